"""Draw where the trained model looks: the attention weights as a heat map. Chapter section 20.13.

A row is a token that asks, a column a token it may look at; the weights of a row sum to 1. To reverse
n digits, cross-attention should light up along the anti-diagonal: row i, which predicts output digit i,
looks at source column n-1-i, and the last row, which predicts <eos>, looks at the source's <eos>.

Run `python train.py` first, then `python viz.py`; `python viz.py --help` lists the options. `--html FILE`
writes a page instead, in which the model itself runs in the browser: see page/.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model import Transformer, attention_weights
from page.build import build, load_models
from toolbox.checkpoint import CheckpointError
from toolbox.command_line import ArgumentParser, run_script, say, shorten
from toolbox.device import add_device_option, choose_device
from toolbox.figures import check_picture, new_figure, save_figure
from toolbox.files import check_outputs, file_name, reason, write_text
from toolbox.heatmap import (
    KINDS,
    add_map_options,
    check_page,
    choose_map,
    layer_number,
    measures,
    picture_path,
    say_grid,
)
from train import (
    CHECKPOINT,
    MAX_LEN,
    MIN_LEN,
    VOCAB,
    decode_digits,
    encode_digits,
    evaluating,
    greedy_decode,
    load_model,
    token_name,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEMO = "7 3 0 9 5 1 8"
CURVE = "training_curve.png"
COLOURS = dict(cmap="Blues", vmin=0.0, aspect="auto")
WRITTEN_UP_TO = 14  # rows or columns; in a larger map the numbers in the cells could not be read
SHORT_NAME = 5  # characters, as in "<bos>"; longer names make the picture larger and stand upright below it


# ------------------------------------------------------------------------------------------------- weights


def attention_maps(
    model: Transformer, digits: str, kind: str = "cross"
) -> tuple[Tensor, list[str], list[str], str]:
    """Decode `digits` greedily, then look at one kind of attention: "cross", "encoder" or "decoder".

    -> weights [layers, h, R, C] on the CPU, the names of the R rows and of the C columns, the output digits.
    The decoder's tokens are those it read on its own: <bos> and its output, less the last token, which it
    never read back.
    """
    src = encode_digits(digits).to(next(model.parameters()).device)
    pred = greedy_decode(model, src, model.settings["max_len"])
    tgt_in = pred[:, :-1]
    with evaluating(model):
        weights = torch.cat(attention_weights(model, src, tgt_in)[kind]).cpu()  # (layers, h, R, C), as B = 1
    source, read = ([token_name(i) for i in ids[0].tolist()] for ids in (src, tgt_in))
    rows = source if kind == "encoder" else read
    columns = read if kind == "decoder" else source
    return weights, rows, columns, decode_digits(pred[0])


def antidiagonal(weights: Tensor) -> float:
    """weights [n+1, n+1] -> mean of the n+1 weights that a perfect reversal would put at 1.

    They are (i, n-1-i) for the n digits, and (n, n), <eos> to <eos>. ValueError for a map that is not square,
    or empty.
    """
    rows, columns = weights.shape
    if rows != columns or not rows:
        raise ValueError(f"a {rows} x {columns} map has no anti-diagonal: it must be square")
    n = rows - 1
    return weights[range(rows), [*reversed(range(n)), n]].mean().item()


# ------------------------------------------------------------------------------------------------- pictures


def extra_room(names: list[str]) -> float:
    """Inches that the longest name needs beyond those of a short one."""
    return 0.09 * max(0, max(map(len, names)) - SHORT_NAME)


def draw_map(
    weights: Tensor, rows: list[str], columns: list[str], title: str, path: Path | None, kind: str = "cross",
    top: float = 1.0,
) -> "Figure":  # fmt: skip
    """Save one map, weights [R, C] with their R row and C column names, as a picture; return the figure.

    Names and title are shown as they are, `$` too. The weight `top` has the darkest colour; left at 1, all
    pictures have the same scale. Nothing is saved where `path` is None.
    """
    _, row_label, column_label = KINDS[kind]
    R, C = weights.shape
    below, beside = extra_room(columns), extra_room(rows)
    figure = new_figure(max(6.4, 1.8 + 0.2 * C) + beside, max(5.4, 1.4 + 0.2 * R) + below)
    axes = figure.subplots()
    image = axes.imshow(weights.numpy(), vmax=top, **COLOURS)
    literal = dict(size=10 if max(R, C) <= 9 else 8.5, parse_math=False)  # size in points
    axes.set_xticks(range(C), columns, rotation=90 if below or C > WRITTEN_UP_TO else 0, **literal)
    axes.set_yticks(range(R), rows, **literal)
    axes.set(xlabel=column_label, ylabel=row_label)
    if max(R, C) <= WRITTEN_UP_TO:
        for row, values in enumerate(weights.tolist()):
            for column, value in enumerate(values):
                colour = "white" if value > 0.6 * top else "black"
                centred = dict(ha="center", va="center", color=colour, size=literal["size"])
                axes.text(column, row, f"{value:.2f}", **centred)
    figure.suptitle(title, size=11, parse_math=False)
    figure.colorbar(image, label="attention weight", aspect=25)
    save_figure(figure, path)
    return figure


def draw_grid(
    weights: Tensor, rows: list[str], columns: list[str], title: str, path: Path | None, kind: str = "cross",
    top: float = 1.0,
) -> "Figure":  # fmt: skip
    """The same as `draw_map`, for every layer (down) and head (across) of weights [layers, h, R, C]."""
    _, row_label, column_label = KINDS[kind]
    layers, heads, R, C = weights.shape
    panel = max(1.5, 0.12 * max(R, C))  # inches
    literal = dict(size=min(8.0, 0.8 * 72 * panel / max(R, C)), parse_math=False)  # size in points
    width, height = max(6.4, 1.4 + panel * heads), 1.4 + (panel + 0.25) * max(layers, 2)
    figure = new_figure(width + extra_room(rows), height + extra_room(columns))
    panels = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    for layer in range(layers):
        for head in range(heads):
            axes = panels[layer, head]
            image = axes.imshow(weights[layer, head].numpy(), vmax=top, **COLOURS)
            axes.set_title(f"layer {layer + 1}, head {head + 1}", size=9)
            axes.set_xticks(range(C), columns, rotation=90, **literal)
            axes.set_yticks(range(R), rows, **literal)
    figure.supxlabel(column_label, size=10)
    figure.supylabel(row_label, size=10)
    figure.suptitle(title, size=11, parse_math=False)
    figure.colorbar(image, ax=panels, label="attention weight", aspect=25)
    save_figure(figure, path)
    return figure


def draw_curve(history: list[dict], path: Path) -> "Figure":
    """Save how training went, epoch by epoch, from a checkpoint's history; return the figure."""
    figure = new_figure(6.4, 6.0)
    loss, accuracy, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))

    def line(axes, name: str, style: str) -> None:
        values = [row[name] for row in history]
        axes.plot([row["epoch"] for row in history], values, style, label=name, clip_on=False)

    line(loss, "loss", "C0o-")
    line(accuracy, "token_acc", "C0o-")
    line(accuracy, "val_exact_match", "C1s--")
    line(rate, "lr", "C0o-")
    loss.set(ylabel="loss (nats per token)", title="Training, epoch by epoch")
    accuracy.set(ylabel="share right", ylim=(0, 1.04))
    accuracy.legend(loc="lower right")
    rate.set(ylabel="learning rate", xlabel="epoch", xlim=(0.5, history[-1]["epoch"] + 0.5))
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rate.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # epochs are whole numbers
    for axes in (loss, accuracy, rate):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    save_figure(figure, path)
    return figure


# --------------------------------------------------------------------------------------------- command line


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="viz.py", description=__doc__)
    add, unset = parser.add_argument, argparse.SUPPRESS
    add("--digits", default=DEMO, help="the string to reverse; spaces and commas do not count")
    add_map_options(parser)
    add("--curve", type=file_name, nargs="?", const=Path(CURVE), default=unset, metavar="FILE",
        help="also draw the training curve (default FILE: %(const)s)")  # fmt: skip
    add("--checkpoint", type=file_name, default=CHECKPOINT, help="written by train.py")
    add("--html", type=file_name, default=unset, metavar="FILE",
        help="write a page that runs the model in a browser, and nothing else")  # fmt: skip
    add("--unmasked", type=file_name, default=unset, metavar="FILE",
        help="for --html: a second model to show, written by page.unmasked")  # fmt: skip
    add_device_option(parser)
    return parser


def legal_digits(args: argparse.Namespace, settings: dict) -> str:
    """--digits without spaces and commas. ValueError where this model cannot read them."""
    if {settings["src_vocab"], settings["tgt_vocab"]} != {VOCAB}:
        raise ValueError(f"--checkpoint {args.checkpoint}: not a model that reverses digits")
    digits, longest = re.sub(r"[\s,]", "", args.digits), settings["max_len"] - 2  # <bos> and <eos>
    if not re.fullmatch("[0-9]+", digits) or len(digits) > longest:
        raise ValueError(f"--digits {args.digits!r}: must be 1 to {longest} digits 0-9, such as {DEMO!r}")
    return digits


def check_args(
    parser: ArgumentParser, args: argparse.Namespace
) -> tuple[argparse.Namespace, Transformer, list[dict]]:
    """-> options, model, history. Ends the program, with nothing written, on anything unusable."""
    try:
        if args.unmasked:
            raise ValueError(f"--unmasked {args.unmasked}: goes with --html only")
        args.out = picture_path(args)
        pictures = [("--out", args.out, "picture")]
        if args.curve:
            check_picture("--curve", args.curve)
            pictures.append(("--curve", args.curve, "picture"))
        check_outputs(pictures, [("--checkpoint", args.checkpoint)])
        model, history = load_model(args.checkpoint, choose_device(args.device))
        args.digits = legal_digits(args, model.settings)
        args.layer = layer_number(args, model.settings)
        if args.curve and not history:
            raise ValueError(f"--curve: {args.checkpoint} holds no history; let train.py finish an epoch")
    except CheckpointError as error:
        parser.error(f"--checkpoint {error}")
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    return args, model, history


def write_page(parser: ArgumentParser, args: argparse.Namespace) -> int:
    """Everything under --html. Ends the program, with nothing written, on anything unusable."""
    try:
        check_page(args, parser)
        inputs = [("--checkpoint", args.checkpoint)]
        inputs += [("--unmasked", args.unmasked)] if args.unmasked else []
        check_outputs([("--html", args.html, "page")], inputs)
        models = load_models(args.checkpoint, args.unmasked)
        page = build(models, legal_digits(args, models[0][0].settings))
        write_text(args.html, page)
    except OSError as error:
        parser.error(f"--html {args.html}: cannot be written ({reason(error)})")
    except ValueError as error:
        parser.error(str(error))
    say(f"wrote {args.html}, {len(page.encode()) / 1e6:.2f} MB: open it in a browser")
    return 0


def say_map(weights: Tensor, rows: list[str], columns: list[str]) -> None:
    """Print weights [R, C] with the names of its R rows and C columns."""
    say(" " * 7 + "".join(f"{name:>6}" for name in columns))
    for name, values in zip(rows, weights.tolist(), strict=True):
        say(f"{name:>7}" + "".join(f"{value:6.2f}" for value in values))


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv, argparse.Namespace(curve=None, html=None, unmasked=None))
    if args.html:
        return write_page(parser, args)
    args, model, history = check_args(parser, args)
    digits = args.digits
    weights, rows, columns, output = attention_maps(model, digits, args.kind)
    right, cross = output == digits[::-1], args.kind == "cross"
    aligned = cross and len(output) == len(digits)

    if not MIN_LEN <= len(digits) <= MAX_LEN:
        say(f"note    {len(digits)} digits: training had {MIN_LEN} to {MAX_LEN}")
    say(f"input   {' '.join(digits)}")
    say(f"output  {' '.join(output) or '(nothing)'}")
    if not right:
        undefined = "; the length differs, so that the anti-diagonal is not defined"
        say(f"wrong   expected {' '.join(digits[::-1])}" + (undefined if cross and not aligned else ""))

    def measured(chosen: Tensor) -> str:
        line = measures(chosen, rows, columns)
        return f"anti-diagonal, mean weight {antidiagonal(chosen):.2f}; {line}" if aligned else line

    text = f"{shorten(digits)} → {shorten(output) or 'nothing'}" + ("" if right else " (wrong)")
    chosen, what = choose_map(weights, args)
    if args.grid:
        draw = draw_grid
        say(what)
        say_grid(chosen, measured)
    else:
        draw = draw_map
        say(f"{what}; each row sums to 1")
        say_map(chosen, rows, columns)
        say(measured(chosen))

    path = args.out
    try:
        draw(chosen, rows, columns, f"{what}\n{text}", path, args.kind)
        say(f"wrote {path}")
        if args.curve:
            path = args.curve
            draw_curve(history, path)
            say(f"wrote {path}")
    except OSError as error:
        print(f"viz.py: error: {path}: cannot be written ({reason(error)})", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_script(main)
