"""Models of open_clip from its own classes, with tiny settings and a stub of torchvision."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.zoo_models import BATCH, Entry, ids, noise, stub_torchvision


def entries() -> list[Entry]:
    stub_torchvision()
    from open_clip.model import CLIP, CustomTextCLIP

    vision: dict[str, Any] = dict(image_size=32, patch_size=8, layers=4, width=32, head_width=8)
    text: dict[str, Any] = dict(context_length=16, vocab_size=99, width=32, heads=4, layers=4)
    resnet: dict[str, Any] = dict(image_size=64, layers=(1, 1, 1, 1), width=16, head_width=8)

    def batch(size: int = 32) -> dict[str, Tensor]:
        return {"image": noise(BATCH, 3, size, size), "text": ids(BATCH, 16)}

    return [
        Entry("CLIP", lambda: CLIP(32, vision, text), batch),
        Entry("CLIP output_dict", lambda: CLIP(32, vision, text, output_dict=True), batch),
        Entry("CLIP ResNet", lambda: CLIP(32, resnet, text), lambda: batch(64)),
        Entry("CLIP quick_gelu", lambda: CLIP(32, vision, text, quick_gelu=True), batch),
        Entry("CustomTextCLIP", lambda: CustomTextCLIP(32, vision, text, init_logit_bias=-10.0), batch),
    ]  # fmt: skip
