"""Models of efficientnet-pytorch."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

from benchmarks.zoo_models import BATCH, Entry, noise


def entries() -> list[Entry]:
    from efficientnet_pytorch import EfficientNet

    options = dict(num_classes=5, drop_connect_rate=0.0, dropout_rate=0.0)
    image = lambda: (noise(BATCH, 3, 64, 64),)  # noqa: E731
    return [
        Entry("efficientnet-b0", lambda: EfficientNet.from_name("efficientnet-b0", **options), image),
        Entry("efficientnet-b0 image_size", lambda: EfficientNet.from_name(
            "efficientnet-b0", **options, image_size=64), image),
    ]  # fmt: skip
