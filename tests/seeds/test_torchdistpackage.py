"""The programs of TorchDistPackage's document on pipelines, with changed imports, over two processes.

The document's ``.cuda()`` and ``torch.cuda.amp.autocast(…)`` are written for any device here.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.compat.torchdistpackage import NaiveDDP, flatten_model, partition_uniform, tpc
from penstock.compat.torchdistpackage.parallel.clip_grad_parallel import clip_grad_norm_
from penstock.compat.torchdistpackage.parallel.pipeline_sched import forward_backward, forward_eval
from tests.support.models import assert_same
from tests.support.ranks import run_ranks


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out.add_(self.downsample(x)))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Like torchvision's, but smaller."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, bias=False, padding=1), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


def images(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(samples, 3, 16, 16, generator=generator)
    return pictures.to(tpc.device), torch.randint(10, (samples,), generator=generator).to(tpc.device)


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[float]:
    best = output.topk(max(topk)).indices == target[:, None]
    return [float(best[:, :k].any(1).float().mean()) for k in topk]


# ── the document's programs ────────────────────────────────────────────────────────────────────────────────────────


def partitioned(model: nn.Module, DDP: Any) -> Any:
    layer_list = [
        'conv1', 'bn1', 'relu', 'maxpool', 'layer1', 'layer2', 'layer3', 'layer4', 'avgpool',
        lambda x: torch.flatten(x, 1), 'fc'
    ]  # fmt: skip
    flat_model = flatten_model(model, layer_list , return_list=True)  # fmt: skip
    md_list = partition_uniform(flat_model)
    model = torch.nn.Sequential(*md_list)

    model = DDP(model)
    return model


def train(model: Any, data_loader: Any, optimizer: Any, criterion: Any, max_norm: float, own_bwd_fn: bool) -> Any:
    # adapted from DeiT
    for samples, targets in data_loader:
        dist.broadcast(samples, tpc.get_ranks_in_group("pipe")[0], tpc.get_group("pipe"))
        dist.broadcast(targets, tpc.get_ranks_in_group("pipe")[0], tpc.get_group("pipe"))

        loss = torch.rand(1).to(tpc.device)

        inputs = []
        if tpc.is_first_in_pipeline_group():
            inputs.append(samples)
        else:
            inputs.append(targets)

        # this line is not necessary, forward_backward will do it.
        optimizer.zero_grad()

        # an example of customized backward_fn
        def bwd_fn(output_obj, output_obj_grad):  # type: ignore[no-untyped-def]
            if output_obj_grad is None:
                model.backward(output_obj)
            else:
                model.backward_grad(output_obj, output_obj_grad)

        def fwd_fn(inputs):  # type: ignore[no-untyped-def]
            with torch.autocast(tpc.device.type, dtype=torch.bfloat16):
                if tpc.is_first_in_pipeline_group():
                    out = model(inputs)
                    return out
                else:
                    out = model(inputs[0])
                    loss = criterion(samples, out, inputs[1])  # noqa: B023
                    # deal with loss ...
                    return loss

        num_microbatches = 4
        loss = forward_backward(
            optimizer,
            fwd_fn,
            bwd_fn if own_bwd_fn else None,  # for simple backward func like loss.backward, we can pass None
            inputs,
            num_microbatches=num_microbatches,
            forward_only=False,
            dtype=torch.bfloat16,
            scatter_gather_tensors=False,
        )

        total_norm = clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return loss, total_norm


def evaluate(model: Any, data_loader: Any, criterion: Any, device: torch.device) -> Any:
    for images, target in data_loader:
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        dist.broadcast(target, tpc.get_ranks_in_group("pipe")[0], tpc.get_group("pipe"))

        inputs = []
        if tpc.is_first_in_pipeline_group():
            inputs = images

        def eval_fwd(img):  # type: ignore[no-untyped-def]
            with torch.autocast(tpc.device.type):
                return model(img)

        output = forward_backward(
            None,
            eval_fwd,
            None,
            inputs,
            num_microbatches=1,
            forward_only=True,
            dtype=torch.float16,
            scatter_gather_tensors=False,
        )
        again = forward_eval(eval_fwd, inputs, torch.float16)
        assert_same(again, output)

        if tpc.is_last_in_pipeline_group():
            # compute output
            with torch.autocast(tpc.device.type):
                loss = criterion(output, target)

            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            return output, loss, acc1, acc5


# ── comparison with the plain model ────────────────────────────────────────────────────────────────────────────────


def programs(rank: int, device_type: str, wrapper: str, own_bwd_fn: bool) -> None:
    tpc.setup_process_groups([("data", 1), ("pipe", 2)])
    tpc.device = device_type  # type: ignore[assignment]
    torch.manual_seed(0)
    whole = ResNet().to(device_type)
    plain = copy.deepcopy(whole)
    ddp = partial(DistributedDataParallel, process_group=tpc.get_group("data"))
    model = partitioned(whole, NaiveDDP if wrapper == "NaiveDDP" else ddp)
    owned = {id(p) for p in model.parameters()}
    mine = {name: p for name, p in whole.named_parameters() if id(p) in owned}
    assert 0 < len(mine) < len(list(plain.parameters()))
    model.backward = lambda output: output.backward()
    model.backward_grad = lambda output, grad: output.backward(grad)

    def criterion(samples: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, plain)]
    batches = [images(samples, seed) for seed, samples in enumerate((16, 10))]
    loss, total_norm = train(model, batches, optimizers[0], criterion, 1.0, own_bwd_fn)
    for samples, targets in batches:
        optimizers[1].zero_grad()
        sizes = [len(part) for part in torch.tensor_split(samples, 4)]
        for part, target in zip(samples.split(sizes), targets.split(sizes), strict=True):
            with torch.autocast(device_type, dtype=torch.bfloat16):
                expected = F.cross_entropy(plain(part), target)
            expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizers[1].step()
    tolerance = {"rtol": 1e-3, "atol": 1e-4}
    assert_same(total_norm, norm, **tolerance)
    if rank == 1:
        assert_same(loss, expected.detach(), **tolerance)
    assert_same(mine, {n: p for n, p in plain.named_parameters() if n in mine}, **tolerance)

    for m in (model, plain):
        m.eval()
    found = evaluate(model, batches[1:], F.cross_entropy, tpc.device)
    if rank == 1:
        with torch.no_grad(), torch.autocast(device_type):
            output = plain(batches[1][0])
        assert found[0].dtype == output.dtype
        assert_same(found[0].float(), output.float(), rtol=2e-2, atol=1e-2)
        assert_same(float(found[1]), pytest.approx(float(F.cross_entropy(output.float(), batches[1][1])), rel=2e-2))
        assert found[3] >= found[2]
    tpc.close_pipeline()
    tpc.device = None  # type: ignore[assignment]


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(("wrapper", "own_bwd_fn"), [("NaiveDDP", False), ("DDP", True)])
def test_resnet(device_type: str, wrapper: str, own_bwd_fn: bool) -> None:
    if device_type == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    for result in run_ranks(programs, 2, device_type, wrapper, own_bwd_fn, timeout=120):
        if isinstance(result, BaseException):
            raise result
