"""The script ``mnist_pipeline.py`` of the PopTorch tutorial, assembled from its snippets, with its command line.

python -m tests.seeds.mnist_pipeline --strategy sharded --offload-optimiser --data <directory of MNIST>
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock.compat.poptorch as poptorch
from tests.seeds.vision import fake_torchvision, full_mnist_folder

__all__ = ["main", "tutorial"]

FILE = Path(__file__).with_name("poptorch_tutorial.txt")


def tutorial() -> list[str]:
    """The snippets of the tutorial, in order, with the import of poptorch changed."""
    return FILE.read_text("utf-8").split("\n# %%\n")


def run(cell: int, names: dict[str, Any]) -> None:
    """Run a snippet of the tutorial."""
    cells = tutorial()
    lines = "\n# %%\n".join([*cells[:cell], ""]).count("\n")  # errors name the line of the file
    exec(compile("\n" * lines + cells[cell], str(FILE), "exec"), names)


def options_of(args: argparse.Namespace, names: dict[str, Any]) -> poptorch.Options:
    opts = poptorch.Options().deviceIterations(args.device_iterations).outputMode(poptorch.OutputMode.All)
    opts.Training.gradientAccumulation(names["gradient_accumulation"])
    opts.setExecutionStrategy(names["pipelined_strategy" if args.strategy == "pipelined" else "sharded_strategy"])
    if args.offload_optimiser:
        place = poptorch.TensorLocationSettings().useOnChipStorage(False)
        opts.TensorLocations.setOptimizerLocation(place)
    return opts.enableProfiling(args.profile_dir) if args.profile else opts


def loader(opts: poptorch.Options, dataset: Any, batch_size: int) -> poptorch.DataLoader:
    mode = poptorch.DataLoaderMode.Async
    return poptorch.DataLoader(opts, dataset, batch_size=batch_size, shuffle=True, mode=mode, num_workers=16)


def accuracy_of(model: nn.Module, opts: poptorch.Options, args: argparse.Namespace, names: dict[str, Any]) -> float:
    """The accuracy on the test set in percent."""
    inference = opts.clone().deviceIterations(names["inference_iterations"])
    inference.Training.gradientAccumulation(1)
    total, batches = 0.0, 0
    test_data = loader(inference, names["test_dataset"], args.test_batch_size)
    with poptorch.inferenceModel(model, inference) as inference_model:
        for data, labels in test_data:
            total += names["accuracy"](inference_model(data), labels)
            batches += 1
    test_data.terminate()
    return total / batches


def main(arguments: Sequence[str] | None = None) -> float:
    """Train and test with the options of the command line; return the accuracy on the test set."""
    parser = argparse.ArgumentParser(description="MNIST training in PopTorch, pipelined or sharded")
    parser.add_argument("--batch-size", type=int, default=40, help="mini-batch size for training")
    parser.add_argument("--device-iterations", type=int, default=10, help="device iterations for training")
    parser.add_argument("--test-batch-size", type=int, default=8, help="batch size for inference")
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs to train for")
    parser.add_argument("--learning-rate", type=float, default=0.001, help="learning rate of the optimiser")
    parser.add_argument("--profile", action="store_true", help="enable profiling")
    parser.add_argument("--profile-dir", default="./profile", help="a directory to save the profile")
    parser.add_argument("--strategy", choices=["pipelined", "sharded"], default="pipelined", help="execution strategy")
    parser.add_argument("--debug", action="store_true", help="print out the debug logging while running")
    parser.add_argument("--offload-optimiser", action="store_true", help="offload the optimiser state")
    parser.add_argument(
        "--data", type=Path, default=full_mnist_folder(), help="the directory of MNIST; else its extract"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.debug:
        poptorch.setLogLevel("DEBUG")
    torch.manual_seed(args.seed)
    names: dict[str, Any] = {"__name__": "mnist_pipeline"}
    with fake_torchvision(args.data):
        for cell in (0, 1, 2, 4, 5, 6, 7, 9, 14, 16, 17):
            run(cell, names)
        names |= {"learning_rate": args.learning_rate, "epochs": args.epochs}
        opts = options_of(args, names)
        training_data = loader(opts, names["train_dataset"], args.batch_size)
        with names["get_training_model"](opts, names["model"]) as training_model:
            names["train"](training_model, training_data)
            training_data.terminate()
        accuracy = accuracy_of(names["model"], opts, args, names)
    print(f"Accuracy on test set: {accuracy:0.2f}%")
    return accuracy


if __name__ == "__main__":
    main()
