"""Score a trained model on a test split: sacreBLEU, cased and lower-cased, and chrF.

Run from the project's folder, after translation.train:

python -m translation.evaluate --split test_2016_flickr

The model decodes the source file on its own, free-running; only then are the outputs, detokenised text, laid
beside the references. Each score comes with sacreBLEU's signature, which says how it was counted.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import argparse
import time

import torch

from toolbox.command_line import ArgumentParser, integer, run_script, say, show_progress
from toolbox.device import choose_device, device_name
from toolbox.files import check_outputs, file_name
from translation.bleu import need_sacrebleu, scores
from translation.checkpoint import checkpoint_files, load_translator
from translation.decode import translate_lines
from translation.prepare import load_split, split_files
from translation.translate import add_decoding_options, run_main, write_lines


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="translation.evaluate", description=__doc__)
    add, text = parser.add_argument, parser.add_mutually_exclusive_group()
    text.add_argument("--data", type=file_name, default="multi30k", help="folder with SPLIT.de and SPLIT.en,"
                      " plain or .gz")  # fmt: skip
    text.add_argument("--sample", action="store_true", help="the built-in pairs: splits train, val, test")
    add("--split", default="test_2016_flickr", help="the start of the files' names")
    add("--out", type=file_name, help="file for the translations, one a line; None: they are not kept")
    add("--show", type=integer(0), default=0, help="print the first so many sentences, reference and output")
    add_decoding_options(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Translate, then score. ValueError, one line, where it cannot be done."""
    if args.out:
        check_outputs([("--out", args.out, "text file")], checkpoint_files(args.checkpoint))
    device = choose_device(args.device)
    need_sacrebleu()
    model, tokenizer, checkpoint = load_translator(args.checkpoint, device)
    languages = checkpoint["run"]["src"], checkpoint["run"]["tgt"]
    data = None if args.sample else args.data
    if args.out and data:
        texts = [("--data", path) for path in split_files(data, args.split, *languages)]
        check_outputs([("--out", args.out, "text file")], texts)
    sources, references = load_split(data, args.split, *languages)
    if not sources:
        raise ValueError(f"--split {args.split}: holds no sentence")
    say(f"device   {device_name(device)}; torch {torch.__version__}")
    say(f"model    {args.checkpoint}, after epoch {checkpoint['epoch']}; {' to '.join(languages)}")
    start = time.perf_counter()
    hypotheses = translate_lines(
        model, tokenizer, sources, args.beam, args.alpha, args.batch_size,
        lambda done: show_progress(f"{args.split}: {done:,} of {len(sources):,} translated"),
    )  # fmt: skip
    seconds = time.perf_counter() - start
    show_progress("")
    say(
        f"decoded  {args.split}, {len(sources):,} sentences, free-running, beam {args.beam}, alpha "
        f"{args.alpha:g}, in {seconds:.1f} s: {len(sources) / seconds:.1f} sentences/s"
    )
    if args.out:
        write_lines("--out", args.out, hypotheses)
        say(f"wrote    {args.out}")
    for name, (score, signature) in scores(hypotheses, references).items():
        say(f"{name:8} {score:.2f}  ({signature})")
    for source, reference, output in list(zip(sources, references, hypotheses, strict=True))[: args.show]:
        say(f"\n  source     {source}\n  reference  {reference}\n  output     {output}")


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    return run_main(parser, lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    run_script(main)
