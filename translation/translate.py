"""Translate sentences, or text line by line, with a trained model.

Run from the project's folder, after translation.train:

python -m translation.translate "Ein Hund schläft."              one output line per sentence given
python -m translation.translate < german.txt > english.txt       standard input, one output line per line
python -m translation.translate --input a.de b.de --output a.en b.en

A blank line stays blank. In Python: `translate(["Ein Hund schläft."])`.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path

from model import Transformer
from toolbox.checkpoint import CheckpointError
from toolbox.command_line import (
    ArgumentParser,
    integer,
    note,
    number,
    run_script,
    say,
    show_progress,
)
from toolbox.device import add_device_option, choose_device
from toolbox.files import FileError, check_outputs, file_name, reason, write_text
from translation.checkpoint import CHECKPOINT, checkpoint_files, load_translator
from translation.data import Tokenizer, check_lines, clean, read_lines
from translation.decode import ALPHA, BATCH, BEAM, translate_lines


@functools.lru_cache(maxsize=2)
def _loaded(path: Path, device, written: int | None):
    return load_translator(path, device)


def translate(
    lines: Sequence[str], checkpoint: Path | str = CHECKPOINT, beam: int = BEAM, alpha: float = ALPHA,
    batch_size: int = BATCH, device: str = "auto",
) -> list[str]:  # fmt: skip
    """Lines -> as many translations, in the same order; a blank line stays blank.

    checkpoint: a run's folder or one of its .pt files, read once and again when it has changed. beam, alpha:
    as in `translation.decode.beam_search`. CheckpointError, a ValueError, where it cannot be used; ValueError
    for an unusable beam, alpha or device; TypeError for a single string, which is no list of lines.
    """
    check_lines(lines)  # before a model is read
    path = Path(checkpoint)
    written = path.stat().st_mtime_ns if path.exists() else None
    model, tokenizer, _ = _loaded(path, choose_device(device), written)
    return translate_lines(model, tokenizer, lines, beam, alpha, batch_size)


def write_lines(option: str, path: Path, lines: Sequence[str]) -> None:
    """One line each, UTF-8; never half written. FileError, naming option and file, where it cannot be."""
    try:
        write_text(path, "".join(line + "\n" for line in lines))
    except OSError as error:
        raise FileError(f"{option} {path}: cannot be written ({reason(error)})") from None


def say_all(lines: Sequence[str]) -> None:
    for line in lines:
        say(line)


def stdin_lines() -> Iterator[str]:
    """Standard input's lines as `translation.data.read_lines` would give them, as soon as they come."""
    for count, raw in enumerate(sys.stdin.buffer, 1):
        try:
            text = raw.decode("utf-8-sig" if count == 1 else "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"standard input: line {count} is not UTF-8 text") from None
        if text:  # a BOM and nothing else is no line
            yield clean(text.removesuffix("\n").removesuffix("\r"))


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", type=file_name, default=CHECKPOINT, help="a run's folder, or one of its .pt files")
    add("--beam", type=integer(1, 1000), default=BEAM, help="hypotheses kept per sentence; 1: greedy")
    add("--alpha", type=number(0, 10), default=ALPHA, help="length penalty; 0: none, so short outputs win")
    add("--batch-size", type=integer(1, 1_000_000), default=BATCH, help="sentences decoded together")
    add_device_option(parser)


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="translation.translate", description=__doc__)
    add = parser.add_argument
    add("sentence", nargs="*", default=argparse.SUPPRESS, help="what to translate; none: standard input")
    add("--input", type=file_name, nargs="+", help="files to translate, UTF-8, plain or gzip")
    add("--output", type=file_name, nargs="+", help="as many files to write; None: standard output")
    add_decoding_options(parser)
    return parser


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """ValueError for what argparse cannot see."""
    args = build_parser().parse_args(argv, argparse.Namespace(sentence=[]))
    if args.sentence and args.input:
        raise ValueError(f"--input {args.input[0]}: leave it out, or the sentence {args.sentence[0]!r}")
    if args.output and len(args.output) != len(args.input or []):
        raise ValueError(
            f"--output: {len(args.output)} files for {len(args.input or [])} of --input; must be equally many"
        )
    outputs = [("--output", path, "text file") for path in args.output or []]
    texts = [("--input", path) for path in args.input or []]
    check_outputs(outputs, texts + checkpoint_files(args.checkpoint))
    args.device = choose_device(args.device)
    return args


def translate_part(
    model: Transformer, tokenizer: Tokenizer, args: argparse.Namespace, lines: list[str], name: str,
    first: int = 1,
) -> list[str]:  # fmt: skip
    """`translate_lines` by the options, with its progress, and a note on stderr for every line cut short.

    name: what a line is called there; first: the number of the first one.
    """
    longest = model.settings["max_len"] - 2  # <bos> and <eos>
    for place, line in enumerate(lines, first):
        if (count := len(tokenizer.encode(line))) > longest:
            note(f"note: {name} {place} has {count} pieces; the model reads the first {longest}")
    output = translate_lines(
        model, tokenizer, lines, args.beam, args.alpha, args.batch_size,
        lambda done: show_progress(f"{name}s: {done:,} of {len(lines):,} translated"),
    )  # fmt: skip
    show_progress("")
    return output


def run(args: argparse.Namespace) -> None:
    """Translate what the options ask for. ValueError, one line, where it cannot be done."""
    files = [read_lines(path) for path in args.input or []]  # all are readable, or nothing is written
    model, tokenizer, _ = load_translator(args.checkpoint, args.device)
    translated = functools.partial(translate_part, model, tokenizer, args)
    for source, lines, target in zip_longest(args.input or [], files, args.output or []):
        output = translated(lines, f"{source}: line")
        if target is None:
            say_all(output)
        else:
            write_lines("--output", target, output)
            note(f"wrote {target}")
    if args.sentence:
        say_all(translated([clean(text) for text in args.sentence], "sentence"))
    elif not args.input:
        lines, done = stdin_lines(), 0
        size = 1 if sys.stdin.isatty() else args.batch_size  # a person who types waits for each answer
        while block := list(islice(lines, size)):
            say_all(translated(block, "line", done + 1))
            done += len(block)


def run_main(parser: ArgumentParser, job: Callable[[], None]) -> int:
    """Do the job -> 0; what its user got wrong ends the program with one line and status 2."""
    with contextlib.suppress(AttributeError):  # stdout is something that is no text file
        sys.stdout.reconfigure(encoding="utf-8")  # also where the system's own encoding is another
    try:
        job()
    except CheckpointError as error:
        parser.error(f"--checkpoint {error}")
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    return 0


def main(argv: list[str] | None = None) -> int:
    return run_main(build_parser(), lambda: run(parse_args(argv)))


if __name__ == "__main__":
    run_script(main)
