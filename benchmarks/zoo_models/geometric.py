"""Graph networks of PyTorch Geometric.

A mini-batch has four graphs of six nodes with the same edges: node features are cut into micro-batches, and the edges
of two graphs go to all of them.
"""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from benchmarks.zoo_models import BATCH, Entry, noise

NODES = 6


def edges() -> Tensor:
    """A ring with chords in each of the two graphs of a micro-batch."""
    ring = torch.arange(NODES)
    one = torch.cat([torch.stack([ring, (ring + 1) % NODES]), torch.stack([ring, (ring + 2) % NODES])], dim=1)
    one = torch.cat([one, one.flip(0)], dim=1)
    return torch.cat([one, one + NODES], dim=1)


class GCNClassifier(nn.Module):
    """The introduction's network: convolutions with functional activations, pooled per graph."""

    def __init__(self, conv: Any, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        from torch_geometric.nn import global_mean_pool

        self.convs = nn.ModuleList(conv(8 if i == 0 else width, width) for i in range(layers))
        self.head, self.pool = nn.Linear(width, 3), global_mean_pool

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.relu(conv(x, edge_index))
        return self.head(self.pool(x, batch))


def entries() -> list[Entry]:
    import torch_geometric.nn as g

    graph = lambda: (noise(BATCH * NODES, 8), ps.Broadcast(edges()))  # noqa: E731
    pooled = lambda: (*graph(), ps.Broadcast(torch.arange(2).repeat_interleave(NODES)))  # noqa: E731
    mlp = lambda a, b: nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))  # noqa: E731
    dense = lambda: (noise(BATCH, NODES, 8), torch.ones(BATCH, NODES, NODES))  # noqa: E731
    pooled_entry = lambda name, build: Entry(name, build, pooled, microbatches_only=True)  # noqa: E731
    basic = dict(in_channels=8, hidden_channels=16, num_layers=4, out_channels=3)
    found = [
        Entry(name, lambda name=name: getattr(g, name)(**basic), graph)
        for name in ("GCN", "GraphSAGE", "GAT", "GIN", "EdgeCNN")
    ]
    found += [
        Entry("GCN jumping knowledge", lambda: g.GCN(**basic, jk="cat", norm="layer_norm"), graph),
        pooled_entry("GCN classifier", lambda: GCNClassifier(g.GCNConv)),
        pooled_entry("GAT classifier", lambda: GCNClassifier(lambda a, b: g.GATv2Conv(a, b, heads=2, concat=False))),
        pooled_entry("GIN classifier", lambda: GCNClassifier(lambda a, b: g.GINConv(mlp(a, b)))),
        pooled_entry("Transformer classifier", lambda: GCNClassifier(g.TransformerConv)),
        Entry("Sequential GCN", lambda: g.Sequential("x, edge_index", [
            (g.GCNConv(8, 16), "x, edge_index -> x"), nn.ReLU(), (g.GCNConv(16, 16), "x, edge_index -> x"), nn.ReLU(),
            (g.GCNConv(16, 16), "x, edge_index -> x"), nn.Linear(16, 3)]), graph),
        Entry("DeepGCN", lambda: DeepGCN(g), graph),
        Entry("DenseGCN", lambda: DenseGraph(g), dense),
        Entry("GraphUNet", lambda: g.GraphUNet(8, 16, 3, depth=2), graph),
        Entry("LightGCN", lambda: Light(g), lambda: (noise(BATCH * NODES, 16), ps.Broadcast(edges()))),
    ]  # fmt: skip
    return found


class DeepGCN(nn.Module):
    """DeepGCNLayer with pre-activation residuals."""

    def __init__(self, g: Any) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(
            g.DeepGCNLayer(g.GENConv(16, 16), nn.LayerNorm(16), nn.ReLU(inplace=True), block="res+") for _ in range(4)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.layers[0].conv(self.encoder(x), edge_index)
        for layer in self.layers[1:]:
            x = layer(x, edge_index)
        return self.head(self.layers[0].act(self.layers[0].norm(x)))


class DenseGraph(nn.Module):
    """DiffPool: dense convolutions, an assignment to clusters and two auxiliary losses."""

    def __init__(self, g: Any) -> None:
        super().__init__()
        self.pool, self.diff_pool = g.DenseSAGEConv(8, 3), g.dense_diff_pool
        self.convs = nn.ModuleList([g.DenseSAGEConv(8, 16), g.DenseSAGEConv(16, 16), g.DenseSAGEConv(16, 16)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, adj: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.pool(x, adj)
        x = self.convs[0](x, adj).relu()
        x, adj, link, entropy = self.diff_pool(x, adj, s)
        for conv in self.convs[1:]:
            x = conv(x, adj).relu()
        return self.head(x.mean(1)), link, entropy


class Light(nn.Module):
    """A sum of the layers' outputs, with parameters around the convolutions."""

    def __init__(self, g: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
        self.convs = nn.ModuleList(g.LGConv() for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        total = x
        for conv in self.convs:
            x = conv(x, edge_index)
            total = total + x
        return self.last(total)
