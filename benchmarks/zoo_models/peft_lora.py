"""Adapters of peft on models of transformers: most parameters are frozen."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.zoo_models import Entry
from benchmarks.zoo_models.transformers_common import lm, model_of, seq2seq, seqcls


def adapted(name: str, config: Any, settings: dict[str, Any] | None = None) -> nn.Module:
    import peft

    model: nn.Module = peft.get_peft_model(model_of(name, settings or {}), config)
    return model


def entries() -> list[Entry]:
    from peft import AdaLoraConfig, IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, VeraConfig

    attention = ["q_proj", "v_proj"]
    t5 = dict(d_ff=64, d_kv=8, num_layers=2, num_decoder_layers=2, num_heads=4)
    lora = lambda **more: LoraConfig(r=4, init_lora_weights=False, target_modules=attention, **more)  # noqa: E731
    blocks = {"blocks": "base_model.model.model.layers"}
    return [
        Entry("LoRA Llama", lambda: adapted("LlamaForCausalLM", lora(task_type="CAUSAL_LM")), lm, True, blocks),
        Entry("LoRA Llama without task", lambda: adapted("LlamaForCausalLM", lora()), lm, True, blocks),
        Entry("LoRA Llama with embeddings", lambda: adapted("LlamaForCausalLM", lora(
            task_type="CAUSAL_LM", modules_to_save=["embed_tokens", "lm_head"])), lm, True, blocks),
        Entry("DoRA Llama", lambda: adapted("LlamaForCausalLM", lora(task_type="CAUSAL_LM", use_dora=True)), lm, True,
              blocks),
        Entry("LoRA all-linear Qwen2", lambda: adapted("Qwen2ForCausalLM", LoraConfig(
            r=4, init_lora_weights=False, target_modules="all-linear", task_type="CAUSAL_LM")), lm, True, blocks),
        Entry("LoRA GPT2", lambda: adapted("GPT2LMHeadModel", LoraConfig(
            r=4, init_lora_weights=False, target_modules=["c_attn"], task_type="CAUSAL_LM")), lm, True),
        Entry("LoRA Bert classification", lambda: adapted("BertForSequenceClassification", LoraConfig(
            r=4, init_lora_weights=False, target_modules=["query", "value"], task_type="SEQ_CLS")), seqcls, True),
        Entry("LoRA T5", lambda: adapted("T5ForConditionalGeneration", LoraConfig(
            r=4, init_lora_weights=False, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM"), t5), seq2seq, True),
        Entry("IA3 Llama", lambda: adapted("LlamaForCausalLM", IA3Config(task_type="CAUSAL_LM",
              target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])), lm, True, blocks),
        Entry("VeRA Llama", lambda: adapted("LlamaForCausalLM", VeraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"], r=8)), lm, True, blocks),
        Entry("AdaLoRA Llama", lambda: adapted("LlamaForCausalLM", AdaLoraConfig(
            task_type="CAUSAL_LM", target_modules=attention, init_r=4, total_step=10)), lm, True, blocks),
        Entry("PromptTuning Llama", lambda: adapted("LlamaForCausalLM", PromptTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=4)), lm, True, blocks),
        Entry("PrefixTuning Llama", lambda: adapted("LlamaForCausalLM", PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=4)), lm, True, blocks),
    ]  # fmt: skip
