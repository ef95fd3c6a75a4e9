"""Networks of MONAI for medical images, in two dimensions unless they need three."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo_models import BATCH, Entry, ids, noise


def entries() -> list[Entry]:
    import monai.networks.nets as nets

    image = lambda: (noise(BATCH, 1, 32, 32),)  # noqa: E731
    volume = lambda: (noise(BATCH, 1, 16, 16, 16),)  # noqa: E731

    def entry(name: str, inputs: Callable[[], Any] = image, **settings: Any) -> Entry:
        return Entry(name, lambda: getattr(nets, name)(**settings), inputs)

    flat = dict(spatial_dims=2, in_channels=1, out_channels=2)
    features = (8, 8, 16, 16, 32, 8)
    steps = lambda: (noise(BATCH, 1, 16, 16), torch.tensor([1, 20, 300, 900]))  # noqa: E731
    return [
        entry("UNet", **flat, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
        entry("AttentionUnet", **flat, channels=(8, 16, 32), strides=(2, 2)),
        entry("BasicUNet", **flat, features=features),
        entry("BasicUNetPlusPlus", **flat, features=features),
        entry("DynUNet", **flat, kernel_size=(3, 3, 3), strides=(1, 2, 2), upsample_kernel_size=(2, 2), filters=(8,
              16, 32), deep_supervision=True, deep_supr_num=1),
        entry("SegResNet", **flat, init_filters=8),
        entry("SegResNetDS", spatial_dims=2, in_channels=1, out_channels=2, init_filters=8, blocks_down=(1, 1, 1),
              dsdepth=2),
        entry("SegResNetVAE", input_image_size=(32, 32), spatial_dims=2, in_channels=1, out_channels=2, init_filters=8),
        entry("VNet", volume, spatial_dims=3, in_channels=1, out_channels=2),
        entry("UNETR", in_channels=1, out_channels=2, img_size=(32, 32), spatial_dims=2, feature_size=8, hidden_size=32,
              mlp_dim=64, num_heads=4),
        entry("SwinUNETR", in_channels=1, out_channels=2, spatial_dims=2, feature_size=12, depths=(1, 1, 1, 1),
              num_heads=(1, 2, 2, 4), inputs=lambda: (noise(BATCH, 1, 64, 64),)),
        entry("HighResNet", **flat),
        entry("DenseNet", spatial_dims=2, in_channels=1, out_channels=2, init_features=8, growth_rate=4,
              block_config=(2, 2, 2)),
        entry("ResNet", block="basic", layers=[1, 1, 1, 1], block_inplanes=[8, 16, 24, 32], spatial_dims=2,
              n_input_channels=1, num_classes=2),
        entry("EfficientNetBN", model_name="efficientnet-b0", spatial_dims=2, in_channels=1, num_classes=2,
              pretrained=False),
        entry("SENet", spatial_dims=2, in_channels=1, block="se_resnet_bottleneck", layers=[1, 1, 1, 1], groups=1,
              reduction=16, inplanes=16, num_classes=2),
        entry("MedNeXt", **flat, init_filters=8),
        entry("FlexibleUNet", in_channels=1, out_channels=2, backbone="efficientnet-b0", spatial_dims=2),
        entry("ViT", in_channels=1, img_size=(32, 32), patch_size=(8, 8), hidden_size=32, mlp_dim=64, num_layers=4,
              num_heads=4, classification=True, spatial_dims=2),
        entry("ViTAutoEnc", in_channels=1, img_size=(32, 32), patch_size=(4, 4), hidden_size=32, mlp_dim=64,
              num_layers=4, num_heads=4, spatial_dims=2),
        entry("AutoEncoder", spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 16), strides=(2, 2)),
        entry("VQVAE", spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 8), num_res_channels=(8, 8),
              num_res_layers=1, downsample_parameters=((2, 4, 1, 1),) * 2, upsample_parameters=((2, 4, 1, 1, 0),) * 2,
              num_embeddings=16, embedding_dim=8),
        entry("DiffusionModelUNet", steps, spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 16),
              num_res_blocks=1, attention_levels=(False, True), norm_num_groups=4, num_head_channels=8),
        entry("DecoderOnlyTransformer", lambda: (ids(BATCH, 12, vocab=20),), num_tokens=20, max_seq_len=16,
              attn_layers_dim=32, attn_layers_depth=4, attn_layers_heads=4),
        entry("RegUNet", spatial_dims=2, in_channels=1, num_channel_initial=8, depth=2, out_channels=2),
        entry("Regressor", in_shape=(1, 32, 32), out_shape=(2,), channels=(8, 16, 16), strides=(2, 2, 2)),
        entry("Discriminator", in_shape=(1, 32, 32), channels=(8, 16), strides=(2, 2)),
        entry("Generator", lambda: (noise(BATCH, 8),), latent_shape=(8,), start_shape=(16, 8, 8), channels=(8, 4, 1),
              strides=(2, 2, 1)),
        entry("PatchDiscriminator", spatial_dims=2, in_channels=1, channels=8, num_layers_d=2),
        entry("FullyConnectedNet", lambda: (noise(BATCH, 8),), in_channels=8, out_channels=2, hidden_channels=(16, 16,
              16)),
        entry("VoxelMorphUNet", lambda: (noise(BATCH, 2, 32, 32),), spatial_dims=2, in_channels=2, unet_out_channels=8,
              channels=(8, 8, 8, 8, 8, 8), final_conv_channels=(8,)),
    ]  # fmt: skip
