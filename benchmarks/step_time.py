"""One training step of the chapter's recipe: model.py beside the same sizes elsewhere, on the same batches.

Run from the project's folder: `python -m benchmarks.step_time`.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.peers import x_transformer
from benchmarks.torch_twin import TorchTransformer
from toolbox.command_line import ArgumentParser, integer, run_script, say
from toolbox.measure import compare, start_benchmark
from train import RECIPES, make_dataset, make_model, make_optimizer, train_step

RUN = RECIPES["chapter"] | dict(seed=0)


def training_step(model: nn.Module, device: torch.device, batch_size: int, precision: str) -> Callable:
    """-> a function that makes one update of `model` on the next batch of the chapter's data."""
    model = model.to(device).train()
    optimizer, scheduler = make_optimizer(model, RUN)
    src, tgt = (ids.to(device).split(batch_size) for ids in make_dataset(20 * batch_size, seed=0))
    count = 0

    def step() -> None:
        nonlocal count
        train_step(model, optimizer, scheduler, src[count % 20], tgt[count % 20], precision)
        count += 1

    return step


def measure(device: torch.device, rounds: int = 30, batch_size: int = 64, precision: str = "fp32") -> dict:
    """Steps of all contenders in turns -> name -> median, quartiles, ratio to model.py's."""
    models = {"model.py": make_model(RUN)}
    settings = models["model.py"].settings
    models["nn.Transformer"] = TorchTransformer(settings)
    if (peer := x_transformer(settings)) is not None:
        models["x-transformers"] = peer
    say(f"training step, batch {batch_size}, dropout {settings['dropout']}, {rounds} each in turns:")
    steps = {name: training_step(model, device, batch_size, precision) for name, model in models.items()}
    return compare(steps, rounds, warmup=5, device=device, label="training step")


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="benchmarks.step_time", description=__doc__)
    parser.add_argument("--rounds", type=integer(2), default=30, help="timed steps of each model")
    parser.add_argument("--batch-size", type=integer(1, 1_000_000), default=64, help="strings per step")
    args, device, precision = start_benchmark(parser, argv)
    measure(device, args.rounds, args.batch_size, precision)
    return 0


if __name__ == "__main__":
    run_script(main)
