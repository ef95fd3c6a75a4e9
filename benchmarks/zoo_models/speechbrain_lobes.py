"""Networks of SpeechBrain, imported with stubs of torchaudio and soundfile, which its data loading uses."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo_models import BATCH, Entry, ids, noise, stub


def entries() -> list[Entry]:
    stub("torchaudio", "transforms functional compliance compliance.kaldi")
    stub("soundfile")
    sys.modules["torchaudio"].list_audio_backends = lambda: ["soundfile"]  # type: ignore[attr-defined]
    import speechbrain  # noqa: F401

    def entry(module: str, name: str, inputs: Callable[[], Any], *, label: str = "", **settings: Any) -> Entry:
        def build() -> Any:
            return getattr(importlib.import_module(f"speechbrain.{module}"), name)(**settings)

        return Entry(f"{module}.{name}{label}", build, inputs)

    features = lambda: (noise(BATCH, 40, 16),)  # noqa: E731
    pair = lambda: {"src": noise(BATCH, 20, 16), "tgt": ids(BATCH, 8), "wav_len": torch.ones(BATCH)}  # noqa: E731
    asr: dict[str, Any] = dict(tgt_vocab=99, input_size=16, d_model=32, nhead=4, num_encoder_layers=2,
                               num_decoder_layers=2, d_ffn=64, dropout=0.0)  # fmt: skip
    return [
        entry("lobes.models.ECAPA_TDNN", "ECAPA_TDNN", features, input_size=16, channels=[16, 16, 16, 16, 48],
              lin_neurons=16, attention_channels=8, res2net_scale=4, se_channels=8),
        entry("lobes.models.Xvector", "Xvector", features, in_channels=16, tdnn_channels=[16, 16, 16, 16, 32],
              lin_neurons=16),
        entry("lobes.models.CRDNN", "CRDNN", features, input_size=16, cnn_channels=(8, 8), rnn_neurons=16, rnn_layers=2,
              dnn_neurons=16),
        entry("lobes.models.VanillaNN", "VanillaNN", features, input_shape=[None, None, 16], dnn_blocks=3,
              dnn_neurons=16),
        entry("lobes.models.RNNLM", "RNNLM", lambda: (ids(BATCH, 12),), output_neurons=99, embedding_dim=16,
              rnn_layers=2, rnn_neurons=16, dnn_neurons=16),
        entry("lobes.models.ResNet", "ResNet", features, input_size=16, channels=[8, 8, 16, 16], block_sizes=[1, 1, 1,
              1], lin_neurons=16),
        entry("lobes.models.conv_tasnet", "MaskNet", lambda: (noise(BATCH, 16, 40),), N=16, B=8, H=16, P=3, X=2, R=2,
              C=2),
        entry("lobes.models.dual_path", "Encoder", lambda: (noise(BATCH, 200),), kernel_size=8, out_channels=16),
        entry("lobes.models.transformer.TransformerASR", "TransformerASR", pair, **asr),
        entry("lobes.models.transformer.TransformerASR", "TransformerASR", pair, label=" conformer", **{**asr,
              "attention_type": "RelPosMHAXL", "encoder_module": "conformer", "normalize_before": True,
              "causal": False}),
        entry("lobes.models.transformer.Transformer", "TransformerEncoder", features, num_layers=4, nhead=4, d_ffn=32,
              d_model=16),
        entry("lobes.models.transformer.Conformer", "ConformerEncoder", lambda: {"src": noise(BATCH, 20, 16)},
              num_layers=4, d_model=16, d_ffn=32, nhead=4, attention_type="regularMHA"),
        entry("lobes.models.transformer.Branchformer", "BranchformerEncoder", features, num_layers=4, d_model=16,
              nhead=4, csgu_linear_units=32, attention_type="regularMHA"),
        entry("nnet.RNN", "LiGRU", features, hidden_size=16, input_shape=[4, 40, 16], num_layers=3),
        entry("nnet.RNN", "QuasiRNN", features, hidden_size=16, input_shape=[4, 40, 16], num_layers=3),
        entry("nnet.unet", "UNetModel", lambda: (noise(BATCH, 1, 16, 16), torch.tensor([1, 20, 300, 900])),
              in_channels=1, model_channels=16, out_channels=1, num_res_blocks=1, attention_resolutions=(),
              channel_mult=(1, 2), norm_num_groups=4),
        entry("lobes.models.HifiGAN", "HifiganGenerator", lambda: (noise(BATCH, 16, 10),), in_channels=16,
              out_channels=1, resblock_type="2", resblock_dilation_sizes=[[1, 3]], resblock_kernel_sizes=[3],
              upsample_kernel_sizes=[4, 4], upsample_initial_channel=16, upsample_factors=[2, 2]),
        entry("lobes.models.ECAPA_TDNN", "Classifier", lambda: (noise(BATCH, 1, 16),), input_size=16, lin_blocks=2,
              lin_neurons=16, out_neurons=5),
    ]  # fmt: skip
