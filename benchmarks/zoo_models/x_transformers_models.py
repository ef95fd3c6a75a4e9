"""Models of x-transformers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_models import BATCH, Entry, ids, noise


def entries() -> list[Entry]:
    import x_transformers as x

    def lm(label: str, **options: Any) -> Entry:
        build = lambda: x.TransformerWrapper(  # noqa: E731
            num_tokens=99, max_seq_len=32, attn_layers=x.Decoder(dim=32, depth=4, heads=4, attn_dim_head=8, **options)
        )
        return Entry(label, build, lambda: (ids(BATCH, 16),))

    encoder = lambda **more: x.Encoder(dim=32, depth=4, heads=4, attn_dim_head=8, **more)  # noqa: E731
    padding = lambda: torch.arange(16)[None] < torch.tensor([16, 12, 16, 9])[:, None]  # noqa: E731
    return [
        lm("TransformerWrapper Decoder"),
        lm("TransformerWrapper rotary", rotary_pos_emb=True),
        lm("TransformerWrapper alibi", alibi_pos_bias=True, alibi_num_heads=2),
        lm("TransformerWrapper flash", attn_flash=True),
        lm("TransformerWrapper rmsnorm glu", use_rmsnorm=True, ff_glu=True, ff_swish=True, ff_no_bias=True),
        lm("TransformerWrapper sandwich", sandwich_norm=True),
        lm("TransformerWrapper kv_heads", attn_kv_heads=2),
        lm("TransformerWrapper rel_pos_bias", rel_pos_bias=True),
        lm("TransformerWrapper residual_attn", residual_attn=True),
        lm("TransformerWrapper shift_tokens", shift_tokens=1),
        lm("TransformerWrapper macaron", macaron=True),
        lm("TransformerWrapper hyper connections", num_residual_streams=2),
        Entry("TransformerWrapper Encoder", lambda: x.TransformerWrapper(
            num_tokens=99, max_seq_len=32, attn_layers=encoder()), lambda: {"x": ids(BATCH, 16), "mask": padding()}),
        Entry("TransformerWrapper memory tokens", lambda: x.TransformerWrapper(
            num_tokens=99, max_seq_len=32, num_memory_tokens=4, attn_layers=encoder()), lambda: (ids(BATCH, 16),)),
        Entry("AutoregressiveWrapper", lambda: x.AutoregressiveWrapper(x.TransformerWrapper(
            num_tokens=99, max_seq_len=32, attn_layers=x.Decoder(dim=32, depth=4, heads=4, attn_dim_head=8))),
            lambda: (ids(BATCH, 16),)),
        Entry("ViTransformerWrapper", lambda: x.ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=5, attn_layers=encoder()), lambda: (noise(BATCH, 3, 32, 32),)),
        Entry("ContinuousTransformerWrapper", lambda: x.ContinuousTransformerWrapper(
            dim_in=12, dim_out=7, max_seq_len=32, attn_layers=encoder()), lambda: (noise(BATCH, 16, 12),)),
        Entry("XTransformer", lambda: x.XTransformer(dim=32, enc_num_tokens=99, enc_depth=2, enc_heads=4,
              enc_max_seq_len=32, dec_num_tokens=99, dec_depth=2, dec_heads=4, dec_max_seq_len=32),
              lambda: (ids(BATCH, 16), ids(BATCH, 12, seed=3))),
    ]  # fmt: skip
