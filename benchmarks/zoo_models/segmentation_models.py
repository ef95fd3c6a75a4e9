"""Models of segmentation-models-pytorch with encoders that do not come from torchvision."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo_models import BATCH, Entry, noise, stub_torchvision


def entries() -> list[Entry]:
    stub_torchvision()
    import segmentation_models_pytorch as smp

    def entry(name: str, encoder: str, size: int = 64, **settings: Any) -> Entry:
        build = lambda: getattr(smp, name)(encoder, encoder_weights=None, classes=2, **settings)  # noqa: E731
        return Entry(f"{name} {encoder}", build, lambda: (noise(BATCH, 3, size, size),))

    small = "tu-test_resnet"
    return [
        entry("Unet", "efficientnet-b0"),
        entry("Unet", "mit_b0"),
        entry("Unet", small, encoder_depth=4, decoder_channels=(32, 16, 16, 8)),
        entry("UnetPlusPlus", small, encoder_depth=4, decoder_channels=(32, 16, 16, 8)),
        entry("MAnet", "efficientnet-b0"),
        entry("Linknet", small),
        entry("FPN", small, decoder_pyramid_channels=32, decoder_segmentation_channels=32),
        entry("PSPNet", small),
        entry("PAN", "efficientnet-b0", 128),
        entry("DeepLabV3", "efficientnet-b0", decoder_channels=32),
        entry("DeepLabV3Plus", "efficientnet-b0", decoder_channels=32),
        entry("UPerNet", "mit_b0", decoder_channels=32),
        entry("Segformer", "mit_b0", decoder_segmentation_channels=32),
    ]  # fmt: skip
