"""Which attention map to draw, and what to print of it: shared by viz.py and translation.attention.

A map is a tensor of weights [R, C]: a row is a token that asks, a column a token it may look at.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from toolbox.command_line import integer, say
from toolbox.figures import check_picture
from toolbox.files import file_name

DECODER_ROW = "decoder input (predicts the next token)"
KINDS = {  # what a kind of attention is called, what its rows are, what its columns are
    "cross": ("Cross-attention", DECODER_ROW, "source token"),
    "encoder": ("Encoder self-attention", "source token (the one that looks)", "source token (looked at)"),
    "decoder": ("Decoder self-attention", DECODER_ROW, "decoder input (looked at)"),
}


# -------------------------------------------------------------------------------------------------- options


def number_or(word: str) -> Callable[[str], int | str]:
    """An argparse type: the word itself, or a whole number of at least 1."""
    return lambda text: word if text == word else integer(1)(text)


def add_map_options(parser: argparse.ArgumentParser) -> None:
    """Which map to draw, and where to. Without --out, args has no `out`: see `picture_path`."""
    add = parser.add_argument
    add("--kind", choices=KINDS, default="cross", help="which attention to look at")
    add("--layer", type=number_or("last"), default="last", help="1 is the first")
    add("--head", type=number_or("mean"), default="mean", help="1 is the first; mean: of all heads")
    add("--grid", action="store_true", help="every layer and head in one picture")
    add("--out", type=file_name, default=argparse.SUPPRESS,
        help="picture (default: KIND_attn.png or KIND_attn_grid.png)")  # fmt: skip


def check_page(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """ValueError when --html, a page of every map, was given together with an option for a picture."""
    for name in ("kind", "layer", "head", "grid"):
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"--html shows every kind, layer and head: leave out --{name}")
    for name in ("out", "curve"):
        if getattr(args, name, None):
            raise ValueError(f"--html draws no picture: leave out --{name}")


def picture_path(args: argparse.Namespace) -> Path:
    """--out, or the name its help promises. ValueError when the map options do not go together."""
    for name, default in (("layer", "last"), ("head", "mean")):
        if args.grid and getattr(args, name) != default:
            raise ValueError(f"--grid draws every {name}: leave out --{name} {getattr(args, name)}")
    path = getattr(args, "out", Path(f"{args.kind}_attn{'_grid' if args.grid else ''}.png"))
    check_picture("--out", path)
    return path


def layer_number(args: argparse.Namespace, settings: dict) -> int:
    """--layer as a number from 1. ValueError when this model does not have the layer or the head."""
    chosen = {"layer": settings["num_layers"] if args.layer == "last" else args.layer, "head": args.head}
    for name, value in chosen.items():
        count = settings[f"num_{name}s"]
        if value != "mean" and value > count:
            raise ValueError(f"--{name} {value}: this model has {name}s 1 to {count}")
    return chosen["layer"]


def choose_map(weights: Tensor, args: argparse.Namespace) -> tuple[Tensor, str]:
    """weights [layers, h, R, C] -> those asked for, all with --grid and else [R, C], and a title for them."""
    layers, heads = weights.shape[:2]
    if args.grid:
        return weights, f"{KINDS[args.kind][0]}, every layer and head"
    chosen = weights[args.layer - 1]
    chosen = chosen.mean(0) if args.head == "mean" else chosen[args.head - 1]
    head = f"mean of {heads} heads" if args.head == "mean" else f"head {args.head} of {heads}"
    return chosen, f"{KINDS[args.kind][0]}, layer {args.layer} of {layers}, {head}"


# ----------------------------------------------------------------------------------------- what is printed


def smallest_row_maximum(weights: Tensor) -> tuple[float, int, int]:
    """weights [R, C] -> the largest weight of the least decided row, its row and its column, from 0."""
    largest, column = weights.max(dim=1)
    row = int(largest.argmin())
    return largest[row].item(), row, int(column[row])


def measures(weights: Tensor, rows: list[str], columns: list[str]) -> str:
    """One line about weights [R, C]: the row that is least decided, and where it looks."""
    value, row, column = smallest_row_maximum(weights)
    return f"smallest row maximum {value:.2f} (row {row + 1}, token {rows[row]}, looks at {columns[column]})"


def say_grid(weights: Tensor, measure: Callable[[Tensor], str]) -> None:
    """Print measure(map) for every layer and head of weights [layers, h, R, C]."""
    for layer, heads in enumerate(weights, start=1):
        for head, chosen in enumerate(heads, start=1):
            say(f"layer {layer}, head {head}: {measure(chosen)}")
