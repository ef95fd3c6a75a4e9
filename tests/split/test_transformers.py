"""Hugging Face models in stages are equal to the plain ones: outputs, loss, gradients, random state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import penstock as ps
from penstock.engine.forward_context import variant_in_flight
from penstock.engine.shapes import FakeStage
from penstock.errors import PlanError
from penstock.split.balance import balance_stages
from penstock.split.plan import Plan, build_plan, run_stages
from penstock.split.trace.chain import TraceChain
from penstock.split.trace.front_end import trace_chain
from tests.split.block_models import assert_staged

pytestmark = pytest.mark.slow

hf = pytest.importorskip("transformers")
hf.logging.set_verbosity_error()

VOCABULARY, CLASSES = 64, 3
SIZE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDE = {**SIZE, "intermediate_size": 48}
DECODER = {**WIDE, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama(**more: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**DECODER, "attention_dropout": 0.1, **more}))


def mistral(**more: Any) -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=3, attention_dropout=0.1, **more))


def qwen3(**more: Any) -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=8, attention_dropout=0.1, **more))


def gemma3(**more: Any) -> nn.Module:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = hf.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=3, layer_types=kinds, **more)
    return hf.Gemma3ForCausalLM(config)


def mixtral(**more: Any) -> nn.Module:
    config = hf.MixtralConfig(**DECODER, num_local_experts=4, attention_dropout=0.1, router_jitter_noise=0.1, **more)
    return hf.MixtralForCausalLM(config)


def gpt2(**more: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, **more))


def bert(**more: Any) -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**WIDE, max_position_embeddings=16, **more))


def bert_classifier(**more: Any) -> nn.Module:
    config = hf.BertConfig(**WIDE, max_position_embeddings=16, num_labels=CLASSES, **more)
    return hf.BertForSequenceClassification(config)


def t5_encoder(**more: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4}
    return hf.T5EncoderModel(hf.T5Config(**sizes, **more))


def vit(**more: Any) -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.1, "num_labels": CLASSES}
    shape = {name: value for name, value in WIDE.items() if name != "vocab_size"}
    return hf.ViTForImageClassification(hf.ViTConfig(**shape, **sizes, **more))


MODELS: list[Callable[..., nn.Module]] = [llama, mistral, qwen3, gemma3, mixtral, gpt2, bert, bert_classifier]
MODELS += [t5_encoder, vit]
BLOCKS = {  # else model.layers
    "gpt2": "transformer.h",
    "bert": "bert.encoder.layer",
    "bert_classifier": "bert.encoder.layer",
    "t5_encoder": "encoder.block",
    "vit": "vit.layers",
}
every_model = pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)


def inputs(build: Callable[..., nn.Module], seed: int = 3) -> dict[str, Tensor]:
    """A batch with padding on the right and labels that are partly ignored."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (3,), generator=generator)
    if build is vit:
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator), "labels": classes}
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=generator)
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 5:] = mask[2, 3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if build is bert_classifier:
        batch["labels"] = classes
    elif build is not t5_encoder:
        batch["labels"] = ids.masked_fill(mask == 0, -100).index_fill(1, torch.tensor([0]), -100)
    return batch


def cut(model: nn.Module, stages: int, *args: Any, **batch: Any) -> Plan:
    """A plan for this call; without one, for a guessed one."""
    return balanced(trace_chain(model, stages=stages, sample=(args, batch) if args or batch else None), stages)


def balanced(chain: TraceChain, stages: int) -> Plan:
    return build_plan(chain, balance_stages(chain, balance=None, stages=stages))


def seeded(build: Callable[..., nn.Module], **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(**more).train()


@functools.cache
def recorded(build: Callable[..., nn.Module]) -> tuple[nn.Module, TraceChain]:
    """A model and its chain for ``inputs(build)``: shared, because most of a test's time is the recording."""
    model = seeded(build)
    return model, trace_chain(model, stages=4, sample=((), inputs(build)))


@functools.cache
def guessed(build: Callable[..., nn.Module]) -> tuple[nn.Module, TraceChain]:
    """The same for a guessed call."""
    model = seeded(build)
    return model, trace_chain(model, stages=4)


def names(build: Any) -> str:
    return str(build.__name__)


# ── equality with the plain model ────────────────────────────────────────────────────────────────────────────────


@every_model
def test_padding_labels_and_dropout(build: Callable[..., nn.Module]) -> None:
    model, chain = recorded(build)
    for stages in (2, 3, 4):
        assert_staged(model, balanced(chain, stages), **inputs(build), use_cache=False)


@every_model
def test_evaluation_without_mask_or_labels(build: Callable[..., nn.Module]) -> None:
    model = seeded(build).eval()
    batch = {name: value for name, value in inputs(build).items() if name in ("input_ids", "pixel_values")}
    output = assert_staged(model, cut(model, 3, **batch), **batch, use_cache=False)
    assert output.get("past_key_values") is None


@every_model
def test_a_plan_for_a_guessed_call_runs_others(build: Callable[..., nn.Module]) -> None:
    model, chain = guessed(build)
    assert_staged(model, balanced(chain, 3), **inputs(build), use_cache=False)


@every_model
def test_gradient_checkpointing_switched_on_after_the_split(build: Callable[..., nn.Module]) -> None:
    model, chain = recorded(build)
    plan = balanced(chain, 3)
    modules = [plan.stage_module(s) for s in range(3)]
    block = model.get_submodule(f"{BLOCKS.get(names(build), 'model.layers')}.2")
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        runs: list[nn.Module] = []
        hook = block.register_forward_pre_hook(lambda module, args, runs=runs: runs.append(module))
        try:
            assert_staged(model, plan, **inputs(build), modules=modules, use_cache=False)
        finally:
            hook.remove()
            model.gradient_checkpointing_disable()
        assert len([run for run in runs if run is block]) == 2  # once more in backward


@pytest.mark.parametrize("build", [llama, gpt2, bert, gemma3], ids=names)
def test_tied_embeddings_are_a_tie_of_the_first_and_the_last_stage(build: Callable[..., nn.Module]) -> None:
    for tied in (True, False):
        model = seeded(build, tie_word_embeddings=tied)
        plan = cut(model, 4, **inputs(build))
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert (embedding is head) == tied
        assert [tie.stages for tie in plan.ties] == ([(0, 3)] if tied else [])
        assert any(parameter is head for parameter in plan.stage_module(3).parameters())
        assert_staged(model, plan, **inputs(build), use_cache=False)


@pytest.mark.parametrize("build", [llama, gemma3, bert], ids=names)
def test_attention_implementation_set_after_the_split(build: Callable[..., nn.Module]) -> None:
    model = seeded(build)
    plan = cut(model, 3, **inputs(build))
    modules = [plan.stage_module(s) for s in range(3)]
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert_staged(model, plan, **inputs(build), modules=modules, use_cache=False)


@pytest.mark.parametrize("build", [llama, gpt2, bert], ids=names)
def test_embeddings_and_positions_given_by_the_user(build: Callable[..., nn.Module]) -> None:
    model = seeded(build)
    batch = inputs(build)
    ids = batch.pop("input_ids")
    batch["inputs_embeds"] = torch.randn(*ids.shape, 32)
    batch["position_ids"] = torch.arange(7).flip(0)[None].expand(3, 7)
    assert_staged(model, cut(model, 3, **batch), **batch, use_cache=False)


def test_arguments_by_position() -> None:
    model = seeded(llama)
    args = inputs(llama)["input_ids"], inputs(llama)["attention_mask"]
    assert_staged(model, cut(model, 3, *args), *args, use_cache=False)


def test_rope_that_depends_on_the_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = seeded(llama, rope_parameters=rope, max_position_embeddings=4)
    assert_staged(model, cut(model, 3, **inputs(llama)), **inputs(llama), use_cache=False)


def test_other_heads_and_a_bare_base_model() -> None:
    config = hf.LlamaConfig(**DECODER, num_labels=CLASSES)
    ids, mask = inputs(llama)["input_ids"], inputs(llama)["attention_mask"]
    for head, labels in (
        (hf.LlamaForSequenceClassification, {"labels": torch.tensor([0, 1, 2])}),
        (hf.LlamaForTokenClassification, {"labels": ids % CLASSES}),
        (hf.LlamaModel, {}),
    ):
        model = seeded(head, config=config)
        batch = {"input_ids": ids, "attention_mask": mask, **labels}
        for stages in (2, 4):
            assert_staged(model, cut(model, stages, **batch), **batch, use_cache=False)


def test_a_model_that_may_drop_layers_but_does_not() -> None:
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 16}
    model = seeded(lambda: hf.OPTForCausalLM(hf.OPTConfig(**SIZE, **sizes)))
    assert_staged(model, cut(model, 3, **inputs(llama)), **inputs(llama), use_cache=False)


def test_bfloat16_and_autocast() -> None:
    model = seeded(llama).to(torch.bfloat16)
    assert_staged(model, cut(model, 3, **inputs(llama)), **inputs(llama), use_cache=False)
    model = seeded(gpt2)
    with torch.autocast("cpu", torch.bfloat16):
        assert_staged(model, cut(model, 3, **inputs(gpt2)), **inputs(gpt2), use_cache=False)


def test_images_that_go_in_among_the_words() -> None:
    sight = {"image_size": 8, "patch_size": 4, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    vision, text = hf.CLIPVisionConfig(**sight, num_attention_heads=4), hf.LlamaConfig(**DECODER)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
    model = seeded(lambda: hf.LlavaForConditionalGeneration(config))
    ids = torch.randint(3, 60, (2, 9)).index_fill(1, torch.arange(1, 5), 63)
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "labels": ids.masked_fill(ids == 63, -100)}
    output = assert_staged(model, cut(model, 3, **batch), **batch, use_cache=False)
    assert output.image_hidden_states is not None


def test_an_encoder_and_a_decoder() -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    config = hf.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    model = seeded(lambda: hf.T5ForConditionalGeneration(config))
    for stages in (2, 3, 4):
        assert_staged(model, cut(model, stages, **inputs(llama)), **inputs(llama), use_cache=False)


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions"])
def test_values_of_every_block_are_returned(flag: str) -> None:
    model = seeded(llama, attn_implementation="eager")
    batch = {**inputs(llama), flag: True}
    plan = cut(model, 2, **batch)
    output = assert_staged(model, plan, **batch, use_cache=False)
    assert len(output[flag.removeprefix("output_")]) >= 4
    assert_staged(model, plan, **inputs(llama), use_cache=False)
    setattr(model.config, flag, True)
    assert_staged(model, cut(model, 3, **inputs(llama)), **inputs(llama), use_cache=False)


def test_the_routers_loss_of_every_block() -> None:
    model = seeded(mixtral, output_router_logits=True)
    output = assert_staged(model, cut(model, 3, **inputs(mixtral)), **inputs(mixtral), use_cache=False)
    assert output.aux_loss > 0


# ── the number of items that the loss is a mean over ─────────────────────────────────────────────────────────────


def test_labels_that_are_no_classes() -> None:
    model = seeded(bert_classifier, problem_type="multi_label_classification")
    batch = {**inputs(bert_classifier), "labels": torch.rand(3, CLASSES)}
    assert_staged(model, cut(model, 2, **batch), **batch, use_cache=False)


def test_a_count_of_the_mini_batch_given_by_the_user_makes_losses_that_add_up() -> None:
    model = seeded(llama).eval()
    batch = inputs(llama)
    plan = cut(model, 2, **batch)
    number = (batch["labels"][:, 1:] != -100).sum()
    whole = model(**batch).loss
    parts = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    outputs = [run_stages(plan, (), {**part, "num_items_in_batch": number}) for part in parts]
    torch.testing.assert_close(sum(output.loss for output in outputs), whole)
    for given in ({}, {"num_items_in_batch": number}):
        with ps.Pipeline(plan, microbatches=2) as pipe:
            torch.testing.assert_close(pipe.step({**batch, **given}).loss, whole)
            torch.testing.assert_close(pipe.evaluate({**batch, **given}).loss, whole)


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────


@every_model
def test_four_stages_have_a_block_each(build: Callable[..., nn.Module]) -> None:
    plan = balanced(guessed(build)[1], 4)
    blocks = [f"{BLOCKS.get(names(build), 'model.layers')}.{i}" for i in range(4)]
    assert [[layer for layer in layers if layer in blocks] for layers in plan.groups] == [[block] for block in blocks]


@every_model
def test_every_parameter_is_in_one_stage_or_a_tie(build: Callable[..., nn.Module]) -> None:
    model, chain = recorded(build)
    plan = balanced(chain, 4)
    places: dict[int, set[int]] = {}
    for s in range(4):
        for parameter in plan.stage_module(s).parameters():
            places.setdefault(id(parameter), set()).add(s)
    assert set(places) == {id(parameter) for parameter in model.parameters()}
    shared = [tuple(sorted(stages)) for stages in places.values() if len(stages) > 1]
    assert shared == [tie.stages for tie in plan.ties]
    held = [set(plan.stage_module(s).state_dict()) for s in range(4)]
    assert set.union(*held) == set(model.state_dict())
    assert sum(map(len, held)) == len(model.state_dict())


@every_model
def test_the_plan_checks_itself(build: Callable[..., nn.Module]) -> None:
    assert balanced(guessed(build)[1], 3).check(inputs(build))


@every_model
def test_splitting_and_running_leave_the_model_as_it_was(build: Callable[..., nn.Module]) -> None:
    model = seeded(build)
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    run_stages(cut(model, 3, **inputs(build)), (), inputs(build))
    assert {name: module.__dict__ for name, module in model.named_modules()} == attributes
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("build", [llama, gpt2, bert, vit], ids=names)
def test_a_model_on_the_meta_device_runs_stage_by_stage(build: Callable[..., nn.Module]) -> None:
    real = seeded(build).eval()
    with torch.device("meta"):
        model = build().eval()
    plan = cut(model, 3, **inputs(build))
    modules = [plan.stage_module(s) for s in range(3)]
    for module in modules:
        module.to_empty(device="cpu")
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            source = real.get_parameter(name) if isinstance(tensor, nn.Parameter) else real.get_buffer(name)
            tensor.data.copy_(source)
    got = run_stages(plan, (), inputs(build), modules)
    assert torch.equal(got.loss, real(**inputs(build)).loss)


@every_model
def test_shapes_can_be_inferred_on_fake_tensors(build: Callable[..., nn.Module]) -> None:
    plan = balanced(recorded(build)[1], 2)
    modules = [plan.stage_module(s) for s in range(2)]
    fakes = [FakeStage(s, module, torch.device("cpu")) for s, module in enumerate(modules)]
    values: tuple[Any, Any] = inputs(build), inputs(build)
    variant = plan.require_chain().variant(inputs(build))
    for fake, module in zip(fakes, modules, strict=True):
        with fake.mode, variant_in_flight(variant):
            blank = pytree.tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), values[0])
            inferred = fake.run(blank)
        values = inferred, module(values[1])
    leaves = [pytree.tree_leaves(dict(value)) for value in values]
    assert [leaf.shape for leaf in leaves[0]] == [leaf.shape for leaf in leaves[1]]


def test_rotary_tables_are_computed_once_and_sent() -> None:
    plan = cut(seeded(llama), 3, **inputs(llama))
    buffers = [dict(plan.stage_module(s).named_buffers()) for s in range(3)]
    assert ["model.rotary_emb.inv_freq" in names for names in buffers] == [True, False, False]
    sent = {(edge.src, edge.dst): edge.values for edge in plan.edges}
    assert all("model.rotary_emb" in sent[0, s] for s in (1, 2))


def test_images_and_labels_go_only_to_the_stages_that_use_them() -> None:
    plan = cut(seeded(vit), 3, **inputs(vit))
    assert not any("pixel_values" in edge.values for edge in plan.edges)
    assert [(edge.src, edge.dst) for edge in plan.edges if "labels" in edge.values] == [(0, 2)]


# ── caches ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cache_makes_no_sense_in_training() -> None:
    model = seeded(llama)
    plan = cut(model, 2, **inputs(llama))
    output = run_stages(plan, (), {**inputs(llama), "use_cache": True})
    assert output.past_key_values is None
    with pytest.raises(PlanError, match="the argument past_key_values is a DynamicCache"):
        run_stages(plan, (), {**inputs(llama), "past_key_values": hf.DynamicCache()})
