"""Train a Hugging Face Llama with random weights to continue arithmetic sequences.

python examples/llama.py                               one thread per stage
torchrun --nproc-per-node=2 examples/llama.py          one process per stage
penstock run --stages 2 examples/llama.py              the same; shows the output of rank 0
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps

VOCABULARY = 32


def network() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,  # the first and the last stage share a parameter
    )
    torch.manual_seed(0)  # the same weights on every rank and in every run
    return LlamaForCausalLM(config)


def batch(step: int, size: int = 16, length: int = 16) -> dict[str, Tensor]:
    """Sequences such as 5 7 9 11 …, with random start and a step of 1 to 4. Shorter sequences are padded."""
    g = torch.Generator().manual_seed(step)
    first, by = (torch.randint(1, most, (size, 1), generator=g) for most in (VOCABULARY, 5))
    ids = (first + by * torch.arange(length)) % VOCABULARY  # [size, length]
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (size, 1), generator=g)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Llama of random weights as a pipeline.")
    parser.add_argument("--stages", type=int, default=4, help="threads; a mesh has a stage for each process")
    parser.add_argument("--schedule", default="zb_h1", help="see penstock schedule --list (default zb_h1)")
    parser.add_argument("--steps", type=int, default=100, help="mini-batches of 16 sequences")
    args = parser.parse_args()

    mesh = ps.Mesh() if ps.is_distributed() else None
    # Penstock records the forward and cuts the recording into stages: the model needs no marks.
    plan = ps.split(network(), stages=args.stages if mesh is None else mesh.pipe)
    # No loss_fn: with labels, the model computes its own loss, which ignores padding.
    pipe = ps.Pipeline(plan, microbatches=4, schedule=args.schedule, mesh=mesh, outputs=None)
    ps.print0(pipe.plan)

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in ps.progress(range(args.steps), pipe, every=max(1, args.steps // 10)):
        pipe.step(batch(step))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    model = network()
    model.load_state_dict(pipe.state_dict(full=True))  # the original parameter names: save_pretrained works
    pipe.close()
    with torch.no_grad():
        said = model(torch.tensor([[3, 6, 9, 12]])).logits[0, -1].argmax()
    ps.print0(f"3, 6, 9, 12, … {said}")


if __name__ == "__main__":
    main()
