"""Time to 99.6 %: the chapter's recipe against `--recipe fast`, in turns; and what each difference is worth.

Run from the project's folder: `python -m benchmarks.recipes`, and `--ablation` for the second part.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import statistics
import time

import torch

from benchmarks.step_time import RUN, training_step
from toolbox.command_line import ArgumentParser, integer, run_script, say
from toolbox.measure import start_benchmark
from train import (
    RECIPES,
    TEST_SEED,
    TEST_SIZE,
    TRAIN_SEED,
    drop_seen,
    exact_match,
    make_dataset,
    make_model,
    make_optimizer,
    train_epoch,
)

GOAL = 0.996


class Run:
    """A training run that can be stopped and scored after every epoch; only the training is timed."""

    def __init__(
        self, recipe: dict, seed: int, device: torch.device, precision: str, strings: int = TEST_SIZE
    ):
        self.recipe, self.precision, self.seconds, self.updates = recipe, precision, 0.0, 0
        run = recipe | dict(seed=seed)
        data = make_dataset(recipe["samples"], TRAIN_SEED, recipe["extra_long"])
        unseen = drop_seen(*make_dataset(2 * TEST_SIZE, TEST_SEED), data[0])
        self.src, self.tgt = (ids.to(device) for ids in data)
        self.test = [ids[:strings].to(device) for ids in unseen]
        self.model = make_model(run).to(device)
        self.optimizer, self.scheduler = make_optimizer(self.model, run)

    def epoch(self) -> float:
        """Train for one epoch -> exact match on the unseen strings."""
        start, batch_size = time.perf_counter(), self.recipe["batch_size"]
        state = self.model, self.optimizer, self.scheduler, self.src, self.tgt
        train_epoch(*state, batch_size, self.precision, self.recipe["smoothing"])
        self.seconds += time.perf_counter() - start
        self.updates += len(self.src) // batch_size
        return exact_match(self.model, *self.test)


def measure(device: torch.device, precision: str = "fp32", seeds: int = 5) -> dict:
    """-> updates, seconds and exact match of both recipes, and the ratio of their times to 99.6 %.

    The runs of the fast recipe are spread between the epochs of the chapter's, so that both meet the same
    machine. The chapter's stops at the first epoch that reaches the goal.
    """
    training_step(make_model(RUN), device, 64, precision)()  # CUDA's start-up is no recipe's time
    say(f"time to {GOAL:.1%} of {TEST_SIZE:,} unseen strings, training only:")
    line = "  {name}  {exact_match:.4f} after {updates:5,} updates, {seconds:.1f} s"
    chapter, fast = Run(RECIPES["chapter"], 0, device, precision), []

    def run_fast() -> None:
        run = Run(RECIPES["fast"], len(fast), device, precision)
        fast.append(dict(exact_match=run.epoch(), updates=run.updates, seconds=run.seconds))
        say(line.format(name=f"fast, seed {len(fast) - 1}      ", **fast[-1]))

    for epoch in range(1, RECIPES["chapter"]["epochs"] + 1):
        first = dict(exact_match=chapter.epoch(), updates=chapter.updates, seconds=chapter.seconds)
        say(line.format(name=f"chapter, epoch {epoch:2}", **first))
        if len(fast) < seeds:
            run_fast()
        if first["exact_match"] >= GOAL:
            break
    else:
        say(f"  the chapter's recipe did not reach {GOAL:.1%}: the ratio is a lower bound")
    while len(fast) < seeds:
        run_fast()
    ratio = chapter.seconds / statistics.median(result["seconds"] for result in fast)
    worst = min(result["exact_match"] for result in fast)
    say(f"  the fast recipe (median) is {ratio:.1f} x as fast; its worst seed has {worst:.4f}")
    return dict(chapter=first, fast=fast, ratio=ratio, worst_fast=worst)


def variants() -> dict[str, dict]:
    """The fast recipe, and with one part at a time put back; 200 updates each."""
    fast, chapter = RECIPES["fast"], RECIPES["chapter"]
    return {
        "fast recipe": fast,
        "with dropout 0.1": fast | dict(dropout=chapter["dropout"]),
        "with 3,200 strings seen 4 times": fast | dict(samples=3200, epochs=4),
        "without label smoothing": fast | dict(smoothing=0.0),
        "without more long strings": fast | dict(extra_long=0),
        "with a third of the peak rate": fast | dict(peak=1e-3),
        "with the chapter's schedule": fast | dict(peak=None, warmup=chapter["warmup"]),
        "chapter's recipe, 200 updates of it": chapter | dict(samples=fast["samples"], epochs=1),
    }


def ablation(
    device: torch.device, precision: str = "fp32", seeds: int = 2, strings: int = 2000
) -> list[dict]:
    """Train every variant -> rows with the exact match of each seed."""
    say(f"exact match on {strings:,} unseen strings after 200 updates, seeds 0 to {seeds - 1}:")
    rows = []
    for name, recipe in variants().items():
        matches = []
        for seed in range(seeds):
            run = Run(recipe, seed, device, precision, strings)
            matches.append([run.epoch() for _ in range(recipe["epochs"])][-1])
        rows.append(dict(variant=name, exact_match=matches))
        say(f"  {name:37}" + "  ".join(f"{exact:.4f}" for exact in matches))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="benchmarks.recipes", description=__doc__)
    parser.add_argument(
        "--ablation", action="store_true", help="put the fast recipe's parts back, one at a time"
    )
    parser.add_argument("--seeds", type=integer(1, 10), help="runs of the fast recipe; None: 5, or 2 of each"
                        " variant with --ablation")  # fmt: skip
    args, device, precision = start_benchmark(parser, argv)
    if args.ablation:
        ablation(device, precision, args.seeds or 2)
    else:
        measure(device, precision, args.seeds or 5)
    return 0


if __name__ == "__main__":
    run_script(main)
