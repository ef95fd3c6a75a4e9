"""Train a small character-level GPT on a text file, and generate text with it.

python examples/gpt.py --text book.txt                 one thread per stage
torchrun --nproc-per-node=2 examples/gpt.py            one process per stage
penstock run --stages 2 examples/gpt.py                the same; shows the output of rank 0
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps

CONTEXT, HEADS = 64, 4  # letters of context; attention heads


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [n, letters, width], in and out
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [n, heads, letters, width / heads]
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, letters: int, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(letters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        self.apply(lambda part: nn.init.normal_(part.weight, std=0.02) if isinstance(part, nn.Embedding) else None)
        self.head.weight = self.embed.weight  # tied: the first and the last stage share it

    def forward(self, ids: Tensor) -> Tensor:  # [n, length] -> [n, letters, length], as cross_entropy needs it
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def network(letters: int) -> GPT:
    torch.manual_seed(0)  # the same weights on every rank and in every run
    return GPT(letters)


def read(path: Path) -> tuple[str, Tensor]:
    """The alphabet of the text, and the text as indices into it."""
    letters = "".join(sorted(set(text := path.read_text(encoding="utf-8"))))
    return letters, torch.tensor([letters.index(letter) for letter in text])


def batch(ids: Tensor, step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs, and targets shifted by one letter. The step is the seed, so all ranks draw the same batch."""
    starts = torch.randint(len(ids) - CONTEXT, (size, 1), generator=torch.Generator().manual_seed(step))
    pieces = ids[starts + torch.arange(CONTEXT + 1)]  # [size, CONTEXT + 1]
    return pieces[:, :-1], pieces[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT on a text, as a pipeline, and let it write.")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE", help="a file of letters")
    parser.add_argument("--steps", type=int, default=200, help="mini-batches of 16 pieces")
    parser.add_argument("--letters", type=int, default=100, help="to write")
    args = parser.parse_args()

    letters, ids = read(args.text)
    mesh = ps.Mesh() if ps.is_distributed() else None
    plan = ps.split(network(len(letters)), blocks="blocks", stages=4 if mesh is None else mesh.pipe)
    pipe = ps.Pipeline(plan, F.cross_entropy, microbatches=4, mesh=mesh, outputs=None)
    ps.print0(pipe.plan)

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in ps.progress(range(args.steps), pipe, every=max(1, args.steps // 10)):
        pipe.step(*batch(ids, step))
        optimizer.step()
        optimizer.zero_grad()

    written, dice = ids[:1], torch.Generator().manual_seed(0)  # the same letters on every rank
    with torch.no_grad():
        for _ in range(args.letters):
            # Every rank samples the next letter, so every rank needs the logits.
            logits = pipe.broadcast(pipe(written[-CONTEXT:].unsqueeze(0)))[0, :, -1].cpu()
            written = torch.cat([written, torch.multinomial(logits.softmax(0), 1, generator=dice)])
    pipe.close()
    ps.print0("".join(letters[i] for i in written.tolist()))


if __name__ == "__main__":
    main()
