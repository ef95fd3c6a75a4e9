"""Text encoders of transformers, with several heads."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

import torch

from benchmarks.zoo_models import BATCH, Entry, ids, mask
from benchmarks.zoo_models.transformers_common import choice, entry, lm, nsp, qa, seqcls, tokcls, tokens


def boxes() -> dict[str, torch.Tensor]:
    """Documents: tokens with their bounding boxes."""
    corners = torch.randint(0, 30, (BATCH, 16, 2), generator=torch.Generator().manual_seed(5))
    return {**tokens(), "bbox": torch.cat([corners, corners + 20], dim=-1)}


def electra() -> dict[str, torch.Tensor]:
    return {**tokens(), "labels": ids(BATCH, 16) % 2}


def albert() -> dict[str, torch.Tensor]:
    return {**lm(), "sentence_order_label": torch.tensor([0, 1, 1, 0])}


def characters() -> dict[str, torch.Tensor]:
    return {**tokens(32), "labels": torch.tensor([0, 1, 1, 0])}


def long_qa() -> dict[str, torch.Tensor]:
    where = mask(16)
    special = torch.zeros_like(where)
    special[:, :2] = 1
    positions = {"start_positions": torch.tensor([1, 2, 3, 4]), "end_positions": torch.tensor([5, 6, 7, 8])}
    return {"input_ids": ids(BATCH, 16), "attention_mask": where, "global_attention_mask": special, **positions}


def entries() -> list[Entry]:
    found = []
    for family in ("Bert", "Roberta", "DistilBert", "Electra", "Camembert", "XLMRoberta", "MobileBert", "MPNet",
                   "ConvBert", "Ernie", "RoFormer", "MegatronBert", "ModernBert", "EuroBert",
                   "XLMRobertaXL", "XmodX", "Data2VecText", "Nystromformer", "Mra", "Yoso", "RemBert",
                   "SqueezeBert", "Deberta", "DebertaV2", "IBert", "RobertaPreLayerNorm"):  # fmt: skip
        extra: dict[str, object] = {}
        name = family
        if family == "DistilBert":
            extra = dict(dim=32, n_layers=4, n_heads=4, hidden_dim=64)
        elif family == "MobileBert":
            extra = dict(intra_bottleneck_size=16, embedding_size=32, hidden_size=32, true_hidden_size=16)
        elif family in ("ConvBert", "RoFormer", "Electra"):
            extra = dict(embedding_size=32)
        elif family in ("Deberta", "DebertaV2"):
            extra = dict(relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False)
        elif family == "SqueezeBert":
            extra = dict(embedding_size=32, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=2)
        elif family == "Nystromformer":
            extra = dict(num_landmarks=16, segment_means_seq_len=16)
        elif family == "RemBert":
            extra = dict(input_embedding_size=16, output_embedding_size=24)
        elif family == "XmodX":
            name, extra = "Xmod", dict(languages=["en_XX"], default_language="en_XX")
        found += [
            entry(f"{name}ForMaskedLM", lm, **extra),
            entry(f"{name}ForSequenceClassification", seqcls, **extra),
        ]
        if family in ("Bert", "Roberta", "DistilBert", "DebertaV2", "ModernBert", "MPNet"):
            found += [
                entry(f"{name}Model", tokens, **extra),
                entry(f"{name}ForQuestionAnswering", qa, **extra),
                entry(f"{name}ForTokenClassification", tokcls, **extra),
                entry(f"{name}ForMultipleChoice", choice, **extra),
            ]
    xlnet = dict(d_inner=64, n_layer=4, n_head=4)
    funnel = dict(block_sizes=[1, 1, 2], num_decoder_layers=1, d_model=32, n_head=4, d_head=8, d_inner=64)
    bird = dict(block_size=4, num_random_blocks=1)
    found += [
        entry("BertForPreTraining", nsp),
        entry("BertForNextSentencePrediction", lambda: {**tokens(), "labels": torch.tensor([0, 1, 1, 0])}),
        entry("BertForMaskedLM", lm, label=" eager", attn_implementation="eager"),
        entry("BertForMaskedLM", lm, label=" chunked", chunk_size_feed_forward=8),
        entry("ElectraForPreTraining", electra, embedding_size=16),
        entry("AlbertForMaskedLM", lm, embedding_size=16),
        entry("AlbertForPreTraining", albert, embedding_size=16),
        entry("AlbertForSequenceClassification", seqcls, label=" 2 groups", embedding_size=16, num_hidden_groups=2),
        entry("XLNetForSequenceClassification", seqcls, **xlnet),
        entry("XLNetModel", tokens, **xlnet),
        entry("XLMForSequenceClassification", seqcls, emb_dim=32, n_layers=4, n_heads=4),
        entry("FlaubertForSequenceClassification", seqcls, emb_dim=32, n_layers=4, n_heads=4),
        entry("FunnelForMaskedLM", lm, **funnel),
        entry("FunnelForSequenceClassification", seqcls, **funnel),
        entry("LongformerForMaskedLM", lm, attention_window=4),
        entry("LongformerForQuestionAnswering", long_qa, attention_window=[4, 4, 4, 4]),
        entry("BigBirdForMaskedLM", lambda: lm(32), label=" full", attention_type="original_full"),
        entry("BigBirdForMaskedLM", lambda: lm(48), label=" sparse", attention_type="block_sparse", **bird),
        entry("FNetForMaskedLM", lambda: {"input_ids": ids(BATCH, 16), "labels": ids(BATCH, 16)}),
        entry("CanineForSequenceClassification", characters, num_hash_buckets=64, local_transformer_stride=8,
              downsampling_rate=4),
        entry("LayoutLMForSequenceClassification", lambda: {**boxes(), "labels": torch.tensor([0, 1, 1, 0])},
              max_2d_position_embeddings=64),
        entry("LiltForSequenceClassification", lambda: {**boxes(), "labels": torch.tensor([0, 1, 1, 0])},
              max_2d_position_embeddings=64, channel_shrink_ratio=2, hidden_size=48),
        entry("BrosForTokenClassification", lambda: {**tokens(), "bbox": boxes()["bbox"].float() / 64,
              "bbox_first_token_mask": torch.ones(BATCH, 16).bool(), "labels": ids(BATCH, 16) % 2}, hidden_size=128),
        entry("LukeForSequenceClassification", seqcls, entity_vocab_size=10, entity_emb_size=16),
        entry("TapasForSequenceClassification", lambda: {**tokens(), "labels": torch.tensor([0, 1, 1, 0])}),
        entry("SplinterForQuestionAnswering", qa),
        entry("EsmForMaskedLM", lm, position_embedding_type="rotary"),
        entry("EsmForSequenceClassification", seqcls, position_embedding_type="absolute"),
        entry("DPRContextEncoder", tokens),
        entry("ReformerForSequenceClassification", characters, axial_pos_embds=False, attn_layers=["local"] * 4,
              feed_forward_size=64, local_attn_chunk_length=8, attention_head_size=8, num_hidden_layers=4),
        entry("ReformerModelWithLMHead", lambda: lm(32), axial_pos_embds=False, attn_layers=["local", "lsh"] * 2,
              feed_forward_size=64, local_attn_chunk_length=8, lsh_attn_chunk_length=8, attention_head_size=8,
              is_decoder=True, num_hashes=1, num_buckets=4, hash_seed=0),
        entry("PerceiverForSequenceClassification", lambda: {"inputs": ids(BATCH, 16), "attention_mask": mask(16),
              "labels": torch.tensor([0, 1, 1, 0])}, d_model=32, d_latents=32, num_latents=8, num_blocks=2,
              num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4),
        entry("MarkupLMForSequenceClassification", seqcls, max_depth=10, xpath_unit_hidden_size=8),
        entry("JinaEmbeddingsV3ForMaskedLM", lm),
    ]  # fmt: skip
    return found
