"""Where translations lose: at rare words, and at length. Needs the outputs of translation.evaluate, no model.

Run from the project's folder:

python -m translation.evaluate --out outputs.txt
python -m translation.breakdown outputs.txt

A word is what is left of a text in lower case without its punctuation; how rare it is, the training text
says. Subwords can spell every word, but what a word means has to be seen, and more than once.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import argparse
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from toolbox.command_line import ArgumentParser, run_script, say
from toolbox.files import file_name
from translation.bleu import corpus_bleu, need_sacrebleu
from translation.data import read_lines
from translation.prepare import add_language_options, check_languages, load_split
from translation.translate import run_main

COUNTS = (0, 1, 3, 10, 30, 100)  # the least of each group, of occurrences in training
LENGTHS = (0, 8, 12, 16)  # the least of each group, of words in the source


def words(line: str) -> list[str]:
    """One line -> its words: "Ein Hund, nass." -> ["ein", "hund", "nass"]."""
    return re.findall(r"\w+", line.lower())


def occurrences(lines: Sequence[str]) -> Counter[str]:
    return Counter(word for line in lines for word in words(line))


def group(number: int, starts: Sequence[int]) -> int:
    """Which group a number is in; starts: the least number of each group, ascending, the first one 0."""
    return bisect_right(starts, number) - 1


def names(starts: Sequence[int]) -> list[str]:
    """What the groups are called: (0, 1, 3) -> ["0", "1 to 2", "3 and more"]."""
    last = [start - 1 for start in starts[1:]]
    ranges = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, last, strict=False)]
    return [*ranges, f"{starts[-1]} and more"]


def rarest(line: str, known: Counter[str]) -> int:
    """How often the line's rarest word occurs in `known`. A line without a word: as the commonest word."""
    counts = [known[word] for word in words(line)]
    return min(counts) if counts else max(known.values(), default=0)


def table_of_sentences(
    title: str, starts: Sequence[int], numbers: Sequence[int],
    outputs: Sequence[str], references: Sequence[str],
) -> list[str]:  # fmt: skip
    """One line for each group that the sentences' numbers fall into, and one for all: how many, BLEU -lc,
    and the number of the outputs' words as a share of the references'."""
    groups = names(starts)
    rows: dict[str, list[int]] = {name: [] for name in groups}
    for row, number in enumerate(numbers):
        rows[groups[group(number, starts)]].append(row)
    rows["all"] = list(range(len(numbers)))
    lines = [f"{title:44}  sentences  BLEU -lc  length"]
    for name, chosen in rows.items():
        if not chosen:
            continue
        texts, golds = [outputs[row] for row in chosen], [references[row] for row in chosen]
        score, _ = corpus_bleu(texts, golds, lowercase=True)
        length = occurrences(texts).total() / max(1, occurrences(golds).total())
        lines.append(f"  {name:42}  {len(chosen):9,}  {score:8.2f}  {length:6.3f}")
    return lines


def table_of_words(known: Counter[str], outputs: Sequence[str], references: Sequence[str]) -> list[str]:
    """One line for each group of COUNTS: how many words the references have, and the share of these that
    are in the outputs of the same sentences, anywhere in them, each as often as there."""
    total, found = Counter(), Counter()
    for output, reference in zip(outputs, references, strict=True):
        wanted = Counter(words(reference))
        for word, count in wanted.items():
            total[group(known[word], COUNTS)] += count
        for word, count in (wanted & Counter(words(output))).items():
            found[group(known[word], COUNTS)] += count
    lines = [f"{'reference word occurs in training':44}      words     found"]
    for index, name in enumerate(names(COUNTS)):
        if total[index]:
            lines.append(f"  {name:42}  {total[index]:9,}  {found[index] / total[index]:8.1%}")
    return lines


def run(args: argparse.Namespace) -> None:
    """Print the three tables. ValueError, one line, where it cannot be done."""
    need_sacrebleu()
    check_languages(args)
    data = None if args.sample else args.data
    outputs = read_lines(args.outputs)
    sources, references = load_split(data, args.split, args.src, args.tgt)
    if len(outputs) != len(sources):
        raise ValueError(
            f"outputs {args.outputs}: {len(outputs):,} lines; --split {args.split} has {len(sources):,}, "
            f"and must have as many"
        )
    if not outputs:
        raise ValueError(f"--split {args.split}: holds no sentence")
    src_known, tgt_known = (occurrences(lines) for lines in load_split(data, "train", args.src, args.tgt))
    counts = [rarest(source, src_known) for source in sources]
    lengths = [len(words(source)) for source in sources]
    tables = [
        table_of_sentences("source's rarest word occurs in training", COUNTS, counts, outputs, references),
        table_of_words(tgt_known, outputs, references),
        table_of_sentences("words in the source", LENGTHS, lengths, outputs, references),
    ]
    say("\n\n".join("\n".join(lines) for lines in tables))


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="translation.breakdown", description=__doc__)
    add, text = parser.add_argument, parser.add_mutually_exclusive_group()
    add("outputs", type=file_name, help="text file, one translation a line, as evaluate --out writes it")
    text.add_argument("--data", type=file_name, default="multi30k", help="folder with the split and train,"
                      " plain or .gz")  # fmt: skip
    text.add_argument("--sample", action="store_true", help="the built-in pairs: splits train, val, test")
    add("--split", default="test_2016_flickr", help="what was translated: the start of the files' names")
    add_language_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    return run_main(parser, lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    run_script(main)
