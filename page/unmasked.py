"""Train the model without its causal mask, by the fast recipe: what that does can be seen in the page.

Run from the project's folder: `python -m page.unmasked`. Under teacher forcing it is never wrong, as it reads
each answer in the input of its decoder. On its own it has nothing to read.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

from pathlib import Path

from page.faults import FaultyTransformer, exact_share, forced_share, with_faults
from toolbox.checkpoint import CheckpointError
from toolbox.command_line import ArgumentParser, integer, run_script, say
from toolbox.files import FileError, check_output, file_name, held
from train import (
    RECIPES,
    TEST_SEED,
    TRAIN_SEED,
    drop_seen,
    make_dataset,
    make_model,
    make_optimizer,
    save_checkpoint,
    train_epoch,
)

CHECKPOINT = "unmasked.pt"
UNMASKED = "no-causal-mask"  # the variant's name in its checkpoint
SCORED = 2000


def train_unmasked(run: dict) -> tuple[FaultyTransformer, list[dict], tuple]:
    """Train by the run's recipe -> the model, its history as train.py keeps it, optimizer and scheduler."""
    data = make_dataset(run["samples"], TRAIN_SEED, run["extra_long"])
    model = make_model(run)
    model.__class__, model.faults = FaultyTransformer, frozenset({"causal"})
    state, history = make_optimizer(model, run), []
    for epoch in range(1, run["epochs"] + 1):
        loss, token_acc = train_epoch(model, *state, *data, run["batch_size"], "fp32", run["smoothing"])
        history.append(dict(epoch=epoch, loss=loss, token_acc=token_acc))
    return model, history, state


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="page.unmasked", description=__doc__)
    parser.add_argument("--seed", type=integer(0, 2**32 - 1), default=0, help="for weights and shuffling")
    parser.add_argument(
        "--out", type=file_name, default=Path(CHECKPOINT), help="checkpoint for viz.py --html"
    )
    args = parser.parse_args(argv)
    run = RECIPES["fast"] | dict(recipe="fast", seed=args.seed)
    try:
        check_output("--out", args.out, "checkpoint")
        with held("--out", args.out):
            model, history, state = train_unmasked(run)
            save_checkpoint(args.out, model, *state, history, run, UNMASKED)
    except CheckpointError as error:
        parser.error(f"--out {error}")
    except FileError as error:
        parser.error(str(error))
    say("trained without a causal mask: loss {loss:.4f}, token_acc {token_acc:.3f}".format(**history[-1]))
    seen = make_dataset(run["samples"], TRAIN_SEED, run["extra_long"])[0]
    src, tgt = (ids[:SCORED] for ids in drop_seen(*make_dataset(2 * SCORED, TEST_SEED), seen))
    say(f"on {len(src):,} unseen strings:")
    say(f"  teacher-forced, token accuracy    {forced_share(model, src, tgt):.4f}")
    say(f"  free-running, exact match         {exact_share(model, src, tgt):.4f}")
    say(f"  the same with the mask put back   {exact_share(with_faults(model), src, tgt):.4f}")
    say(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    run_script(main)
