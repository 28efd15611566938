"""Question 3: token accuracy under teacher forcing against exact match; and what a prefix with mistakes does.

Exact match does not show exposure bias: a free-running answer is right exactly when every token is right
after the right prefix. The accuracy of single tokens, forced and free-running, does. A model stopped early
makes enough mistakes to compare.
"""

import torch
from torch import Tensor, nn

from exercises.common import (
    RECIPE,
    Exercise,
    Variant,
    forced_tokens,
    free_tokens,
    share,
    strings_of_length,
    token_accuracy,
)
from exercises.pictures import STYLES, WHAT, prefer
from toolbox.figures import new_figure
from train import MAX_LEN, MIN_LEN, NUM_OFFSET

STRINGS = 500  # of each length
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
PLACE = 4  # of the single corrupted digit, counted from 1


def stopped_early(run: dict) -> dict:
    """A fifth of the chapter's epochs, or half of a one-epoch run's strings."""
    return dict(epochs=run["epochs"] // 5 or 1) if run["epochs"] > 1 else dict(samples=run["samples"] // 2)


EARLY = Variant("early", "stopped early", change=stopped_early)


def by_length(model: nn.Module, length: int) -> dict:
    """Accuracy of tokens, forced and free, and of whole answers, on strings of one length."""
    src, tgt = strings_of_length(length, STRINGS)
    forced, free = forced_tokens(model, src, tgt), free_tokens(model, src, tgt)
    gold, accuracy = tgt[:, 1:], token_accuracy(forced, tgt)
    return dict(
        forced=accuracy,
        free=token_accuracy(free, tgt),
        exact_match=share((free == gold).all(1)),
        forced_all_right=share((forced == gold).all(1)),
        if_independent=accuracy ** (length + 1),  # what exact match were if mistakes fell at random
    )


def corrupt(tgt_in: Tensor, where: Tensor) -> Tensor:
    """tgt_in [n, L] -> the same with a wrong digit at the places `where` [n, L], but not for <bos>."""
    generator = torch.Generator().manual_seed(0)
    shift = torch.randint(1, 10, tgt_in.shape, generator=generator)
    other = (tgt_in - NUM_OFFSET + shift) % 10 + NUM_OFFSET
    return tgt_in.where(~where | (tgt_in < NUM_OFFSET), other)


def after_corruption(model: nn.Module) -> dict:
    """Token accuracy on strings of 12 digits after a prefix with wrong digits in it.

    `shares`: for each of SHARES, that share of its digits wrong. `one`: only the digit at PLACE; by place.
    """
    src, tgt = strings_of_length(MAX_LEN, STRINGS)
    tgt_in, gold = tgt[:, :-1], tgt[:, 1:]
    chance = torch.rand(tgt_in.shape, generator=torch.Generator().manual_seed(1))
    shares = []
    for wrong in SHARES:
        said = forced_tokens(model, src, tgt, corrupt(tgt_in, chance < wrong))
        shares.append(dict(share=wrong, accuracy=share(said == gold)))
    one = torch.zeros_like(tgt_in, dtype=torch.bool)
    one[:, PLACE] = True
    said = forced_tokens(model, src, tgt, corrupt(tgt_in, one))
    return dict(shares=shares, one=(said == gold).float().mean(0).tolist())


def measure(load, run: dict) -> dict:
    measured = {}
    for variant in EXERCISE.variants:
        model = load(variant)
        lengths = {str(n): by_length(model, n) for n in range(MIN_LEN, MAX_LEN + 1)}
        measured[variant.name] = dict(lengths=lengths, corrupted=after_corruption(model))
    return measured


def tables(results: dict, measured: dict) -> list[list[list[str]]]:
    """Strings of MAX_LEN digits, first seed: accuracies; token accuracy after a corrupted prefix."""
    names = {EARLY.name: f", {EARLY.label}"}
    models = {
        f"{WHAT[recipe]}{names.get(name, '')}": found
        for recipe, seeds in measured.items()
        for name, found in seeds[0].items()
    }
    whats = ("forced", "free", "exact_match", "if_independent")
    rows = [["", "token accuracy, forced", "free-running", "exact match", "if mistakes were independent"]]
    after = [["share of wrong digits in the prefix", *(f"{wrong:g}" for wrong in SHARES)]]
    for label, found in models.items():
        rows.append([label, *(f"{found['lengths'][str(MAX_LEN)][what]:.3f}" for what in whats)])
        after.append([label, *(f"{row['accuracy']:.3f}" for row in found["corrupted"]["shares"])])
    return [rows, after]


def draw(results: dict, measured: dict):
    figure = new_figure(10.0, 4.0)
    left, right = figure.subplots(1, 2)
    found, recipe = prefer(measured)
    whats = ("forced", "token, forced"), ("free", "token, free"), ("exact_match", "exact match")
    looks = {"recipe": dict(color="C0"), "early": dict(color="C1", markerfacecolor="white")}
    for (name, look), style in zip(looks.items(), STYLES, strict=False):
        shares = found[name]["corrupted"]["shares"]
        points = [row["share"] for row in shares], [row["accuracy"] for row in shares]
        right.plot(*points, label=name, **style | look)
        lengths = [int(n) for n in found[name]["lengths"]]
        for (what, label), style in zip(whats, STYLES, strict=False):
            values = [row[what] for row in found[name]["lengths"].values()]
            left.plot(lengths, values, label=f"{name}: {label}", **style | look)
    left.set(xlabel="digits", ylabel="share right", ylim=(0, 1.04), title=f"By length; {recipe}")
    left.legend(fontsize=8)
    right.set(xlabel="share of the prefix's digits that are wrong", ylabel="token accuracy", ylim=(0, 1.04))
    right.set_title("After a corrupted prefix, 12 digits")
    right.legend()
    return figure


EXERCISE = Exercise(
    "Question 3: exposure bias",
    (RECIPE, EARLY),
    measure=measure,
    tables=tables,
    draw=draw,
)
