"""Draw where the translator looks: the attention weights between subwords as a heat map.

Run from the project's folder, once translation.train has written a checkpoint:

python -m translation.attention "Ein Hund rennt."                           cross-attention, last layer
python -m translation.attention "Ein Hund rennt." --kind encoder --grid     every layer and head
python -m translation.attention "Ein Hund rennt." --html out.html           a page with all of them

The sentence is translated free-running, by beam search. A row is a piece that asks, a column a piece it may
look at; the weights of a row sum to 1. ▁ is SentencePiece's mark for a space, <0xE6> a byte of a character
that has no piece. A character that matplotlib's font lacks is drawn as its code, 日 as <U+65E5>.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model import Transformer, attention_weights
from page.build import fill
from toolbox.checkpoint import CheckpointError
from toolbox.command_line import ArgumentParser, integer, run_script, say, shorten
from toolbox.device import add_device_option, choose_device
from toolbox.files import check_outputs, file_name, reason, write_text
from toolbox.heatmap import (
    add_map_options,
    check_page,
    choose_map,
    layer_number,
    measures,
    picture_path,
    say_grid,
)
from train import BOS_ID, EOS_ID, evaluating
from translation.checkpoint import CHECKPOINT, checkpoint_files, load_translator
from translation.data import Tokenizer, clean
from translation.decode import BEAM, beam_search, output_limit
from viz import draw_grid, draw_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDEST_BEAM = 100
TITLE_LINE = 60  # characters of a sentence that fit above the narrowest picture


# -------------------------------------------------------------------------------------------------- weights


def read_sentence(model: Transformer, tokenizer: Tokenizer, line: str) -> list[int]:
    """The ids of the line's pieces. ValueError, naming the line, where it is blank or too long."""
    ids, longest = tokenizer.encode(line), model.settings["max_len"] - 2  # <bos> and <eos>
    if not 1 <= len(ids) <= longest:
        count = f"{len(ids)} pieces" if ids else "blank"
        raise ValueError(
            f"sentence {shorten(line, 40)!r}: is {count}; this model reads 1 to {longest} pieces"
        )
    return ids


def attention_maps(
    model: Transformer, tokenizer: Tokenizer, line: str, kind: str = "cross", beam: int = BEAM
) -> tuple[Tensor, list[str], list[str], list[int]]:
    """Translate the line, then look at one kind of attention: "cross", "encoder" or "decoder".

    -> weights [layers, h, R, C] on the CPU, the pieces of the R rows and of the C columns, the output's ids.
    The decoder's pieces are those it read on its own: <bos> and its output, less the last piece, which it
    never read back. An output has at most 2 * source pieces + 10 tokens, and what the model's max_len allows.
    ValueError as `read_sentence`.
    """
    weights, source, read, output = all_maps(model, tokenizer, line, beam)
    rows = source if kind == "encoder" else read
    columns = read if kind == "decoder" else source
    return weights[kind], rows, columns, output


def all_maps(
    model: Transformer, tokenizer: Tokenizer, line: str, beam: int = BEAM
) -> tuple[dict[str, Tensor], list[str], list[str], list[int]]:
    """The same for all kinds -> kind -> weights, the source's pieces, those the decoder read, the output."""
    ids = read_sentence(model, tokenizer, line)
    src = torch.tensor([[BOS_ID, *ids, EOS_ID]], device=next(model.parameters()).device)
    limit = output_limit(len(ids), model.settings["max_len"])
    output = beam_search(model, src, beam, max_len=limit)[0].ids
    tgt_in = src.new_tensor([[BOS_ID, *output[:-1]]])
    with evaluating(model):
        maps = attention_weights(model, src, tgt_in)
    weights = {kind: torch.cat(layers).cpu() for kind, layers in maps.items()}  # (layers, h, R, C), as B = 1
    source, read = (tokenizer.pieces(row[0].tolist()) for row in (src, tgt_in))
    return weights, source, read, output


# ------------------------------------------------------------------------------------------------- pictures


def legible(text: str) -> str:
    """The text with each character that matplotlib's font lacks as its code, such as <U+65E5> for 日."""
    from matplotlib import font_manager

    families = font_manager.FontProperties().get_family()
    files = [font_manager.findfont(font_manager.FontProperties(family=[family])) for family in families]
    fonts = [font_manager.get_font(file) for file in files]
    return "".join(
        c if any(font.get_char_index(ord(c)) for font in fonts) else f"<U+{ord(c):04X}>" for c in text
    )


def draw(
    weights: Tensor, rows: list[str], columns: list[str], what: str, sentences: tuple[str, str],
    path: Path | None, kind: str,
) -> "Figure":  # fmt: skip
    """A map, weights [R, C], or a grid of all, [layers, h, R, C], titled with `what`, source, translation.

    The darkest colour is the largest weight, rounded up to a tenth: among many pieces all may be small.
    """
    source, translation = (shorten(legible(text), TITLE_LINE) for text in sentences)
    names = [[legible(name) for name in side] for side in (rows, columns)]
    title = f"{what}\n{source}\n→ {translation or 'nothing'}"
    top = max(1, math.ceil(round(10 * weights.max().item(), 3))) / 10
    return (draw_map if weights.dim() == 2 else draw_grid)(weights, *names, title, path, kind, min(top, 1.0))


def draw_example(
    model: Transformer, tokenizer: Tokenizer, line: str, path: Path | None = None, beam: int = BEAM
) -> "Figure":
    """Cross-attention of the last layer, mean of its heads, while translating the line; saved if `path`.

    The model keeps its mode and the random numbers their place, so that training may call it.
    ValueError as `read_sentence`; ModuleNotFoundError without matplotlib.
    """
    weights, rows, columns, output = attention_maps(model, tokenizer, line, beam=beam)
    last = argparse.Namespace(kind="cross", layer=len(weights), head="mean", grid=False)
    chosen, what = choose_map(weights, last)
    return draw(chosen, rows, columns, what, (clean(line), tokenizer.decode(output)), path, "cross")


# ----------------------------------------------------------------------------------------------- the page


def build_page(model: Transformer, tokenizer: Tokenizer, line: str, beam: int = BEAM) -> str:
    """A page with every map of one sentence, as HTML; the weights to four decimals, and no model inside.

    ValueError as `read_sentence`.
    """
    weights, source, read, output = all_maps(model, tokenizer, line, beam)
    rounded = {
        kind: [[[[round(w, 4) for w in row] for row in head] for head in layer] for layer in maps.tolist()]
        for kind, maps in weights.items()
    }
    data = dict(
        sentence=line,
        translation=tokenizer.decode(output),
        source=source,
        read=read,
        writes=tokenizer.pieces(output),
        weights=rounded,
        facts=f"Translated free-running, beam {beam}. Written by translation.attention --html.",
    )
    return fill(data, template="sentence.html")


# --------------------------------------------------------------------------------------------- command line


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="translation.attention", description=__doc__)
    add = parser.add_argument
    add("sentence", help="what to translate, in quotes")
    add("--checkpoint", type=file_name, default=CHECKPOINT, help="a run's folder, or one of its .pt files")
    add_map_options(parser)
    add("--html", type=file_name, default=argparse.SUPPRESS, metavar="FILE",
        help="write a page with every kind, layer and head instead of a picture")  # fmt: skip
    add("--beam", type=integer(1, WIDEST_BEAM), default=BEAM, help="hypotheses kept; 1: greedy")
    add_device_option(parser)
    return parser


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, Transformer, Tokenizer]:
    """-> options, model, tokeniser. Ends the program, with nothing written, on anything unusable."""
    parser = build_parser()
    args = parser.parse_args(argv, argparse.Namespace(html=None))
    try:
        if args.html:
            check_page(args, parser)
            output = ("--html", args.html, "page")
        else:
            args.out = picture_path(args)
            output = ("--out", args.out, "picture")
        check_outputs([output], checkpoint_files(args.checkpoint))
        model, tokenizer, _ = load_translator(args.checkpoint, choose_device(args.device))
        args.layer = layer_number(args, model.settings)
        args.sentence = clean(args.sentence)
        read_sentence(model, tokenizer, args.sentence)
    except CheckpointError as error:
        parser.error(f"--checkpoint {error}")
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    return args, model, tokenizer


def say_map(weights: Tensor, rows: list[str], columns: list[str], says: list[str] | None) -> None:
    """Print for each row of weights [R, C] the column it looks at most; `says`: what the row predicts."""
    table = [["piece", *(["says"] if says else []), "looks most at"]]
    for i, (weight, column) in enumerate(zip(*(part.tolist() for part in weights.max(dim=1)), strict=True)):
        table.append([rows[i], *([says[i]] if says else []), f"{columns[column]} {weight:.2f}"])
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for cells in table:
        say("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())


def cannot_write(name: str, error: OSError) -> int:
    """Say so in one line -> exit status."""
    print(f"translation.attention: error: {name}: cannot be written ({reason(error)})", file=sys.stderr)
    return 2


def write_page(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> int:
    try:
        write_text(args.html, build_page(model, tokenizer, args.sentence, args.beam))
    except OSError as error:
        return cannot_write(f"--html {args.html}", error)
    say(f"wrote {args.html}: open it in a browser")
    return 0


def main(argv: list[str] | None = None) -> int:
    args, model, tokenizer = parse_args(argv)
    if args.html:
        return write_page(args, model, tokenizer)
    weights, rows, columns, output = attention_maps(model, tokenizer, args.sentence, args.kind, args.beam)
    translation = tokenizer.decode(output)
    say(f"source       {args.sentence}")
    say(f"translation  {translation or '(nothing)'}")

    chosen, what = choose_map(weights, args)
    if args.grid:
        say(what)
        say_grid(chosen, lambda weights: measures(weights, rows, columns))
    else:
        say(f"{what}; each row sums to 1")
        say_map(chosen, rows, columns, None if args.kind == "encoder" else tokenizer.pieces(output))
        say(measures(chosen, rows, columns))
    try:
        draw(chosen, rows, columns, what, (args.sentence, translation), args.out, args.kind)
    except OSError as error:
        return cannot_write(str(args.out), error)
    say(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    run_script(main)
