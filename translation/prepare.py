"""Fetch Multi30k, check it, show its subwords and batches. Training learns the same subwords for itself.

Run from the project's folder:

python -m translation.prepare             downloads 1.3 MB into ./multi30k, once
python -m translation.prepare --sample    the 160 built-in pairs, no network
python -m translation.prepare --own --data DIR --src fr --tgt en
                                          your own train.fr, train.en, val.fr, ... in DIR, plain or .gz
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import argparse
import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from toolbox.command_line import ArgumentParser, integer, run_script, say, show_progress
from toolbox.files import file_name, reason, replacing
from translation.data import (
    MAX_LENGTH,
    MAX_TOKENS,
    VOCAB_SIZE,
    LangPairDataset,
    Tokenizer,
    TransformerBatchSampler,
    read_parallel,
)
from translation.sample import split_sample

URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
SPLITS = ("train", "val", "test_2016_flickr", "test_2017_flickr")
SHA256 = {
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    "test_2017_flickr.de.gz": "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee",
    "test_2017_flickr.en.gz": "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074",
}
CHUNK = 64 * 1024  # bytes read at a time


def fetch(folder: Path, timeout: float = 30) -> list[str]:
    """Bring `folder` to hold every file of SHA256 -> the names that had to be downloaded.

    A file that is there and right is left alone. One that is there and wrong is never overwritten:
    ValueError. A download is checked before it gets its name, so a broken one leaves nothing behind.
    ValueError, one line, names the files still missing and where to put them by hand.
    """
    wrong = [n for n in SHA256 if (folder / n).exists() and _file_sha256(folder / n) != SHA256[n]]
    if wrong:
        raise ValueError(
            f"--data {folder}: {', '.join(wrong)} differs from Multi30k's (sha256); move it away to have it "
            f"fetched again, or use your own files as they are with --own"
        )
    missing = [name for name in SHA256 if not (folder / name).exists()]
    if missing:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--data {folder}: cannot be made ({reason(error)})") from None
    for number, name in enumerate(missing):
        try:
            _download(folder / name, timeout, f"{name} ({number + 1} of {len(missing)})")
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = " ".join(str(getattr(error, "reason", "")).split()) or reason(error) or type(error).__name__
            raise ValueError(
                f"cannot fetch {URL}{name} ({why}); put these files by hand into {folder}: "
                f"{', '.join(missing[number:])}; or use --sample, which needs no network"
            ) from None
        finally:
            show_progress("")
    return missing


def _download(path: Path, timeout: float, label: str) -> None:
    """One file of URL, checked, then moved into place. OSError, HTTPException or ValueError if not."""
    digest, done = hashlib.sha256(), 0
    with urllib.request.urlopen(URL + path.name, timeout=timeout) as reply, replacing(path) as file:
        total = reply.headers.get("Content-Length")
        while chunk := reply.read(CHUNK):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            show_progress(f"{label}: {done:,}" + (f" of {int(total):,} bytes" if total else " bytes"))
        if digest.hexdigest() != SHA256[path.name]:
            raise ValueError(f"{done:,} bytes came, and their sha256 is not the expected one")


def _file_sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({reason(error)})") from None


def load_split(
    data: Path | str | None, split: str, src: str = "de", tgt: str = "en"
) -> tuple[list[str], list[str]]:
    """Source and target lines of one split, equally many, as `read_parallel` gives them.

    data: a folder with SPLIT.SRC and SPLIT.TGT, plain or with .gz (where both are there, .gz is read); or
    None for the built-in sample, which has "de" and "en" and one test split for every name that starts with
    "test". ValueError names the file that is missing or unusable.
    """
    if data is None:
        columns = {"de": 0, "en": 1}
        for language in (src, tgt):
            if language not in columns:
                raise ValueError(f"language {language!r}: the built-in sample has only de and en")
        pairs = split_sample(split)
        return [pair[columns[src]] for pair in pairs], [pair[columns[tgt]] for pair in pairs]
    return read_parallel(*split_files(Path(data), split, src, tgt))


def split_files(folder: Path, split: str, src: str, tgt: str) -> list[Path]:
    """The two files that `load_split` reads. ValueError names the one that is missing."""
    return [_split_file(folder, f"{split}.{language}") for language in (src, tgt)]


def _split_file(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise ValueError(
        f"{folder / name}: no such file, nor {name}.gz (python -m translation.prepare fetches Multi30k)"
    )


def report(dataset: LangPairDataset, line_count: int, max_length: int) -> None:
    """Print what was dropped and how the rest falls into batches."""
    sampler = TransformerBatchSampler(dataset.lengths, MAX_TOKENS)
    say(
        f"pairs      {len(dataset):,} of {line_count:,} kept; dropped {dataset.dropped_empty:,} with an "
        f"empty side, {dataset.dropped_long:,} with more than {max_length} pieces"
    )
    say(
        f"batches    {len(sampler):,} an epoch, each at most {MAX_TOKENS:,} tokens a side; "
        f"{sampler.padding_share():.1%} padding"
        + (f"; {sampler.oversized} pairs alone, longer than that" if sampler.oversized else "")
    )


def add_language_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--src", default="de", help="language translated from, the end of its files' names")
    parser.add_argument("--tgt", default="en", help="language translated to")


def check_languages(args: argparse.Namespace) -> None:
    """ValueError where --src and --tgt name one language."""
    if args.src == args.tgt:
        raise ValueError(f"--src and --tgt are both {args.src}: must differ")


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="translation.prepare", description=__doc__)
    add, text = parser.add_argument, parser.add_mutually_exclusive_group()
    text.add_argument("--data", type=file_name, default="multi30k", help="folder of the text files; missing"
                      " ones are fetched")  # fmt: skip
    text.add_argument("--sample", action="store_true", help="use the 160 built-in pairs instead of --data")
    add("--own", action="store_true", help="use the files in --data as they are: nothing fetched or checked")
    add_language_options(parser)
    add("--vocab-size", type=integer(1, 1_000_000), default=VOCAB_SIZE, help="subword pieces, at most")
    add(
        "--max-length",
        type=integer(1, 100_000),
        default=MAX_LENGTH,
        help="drop pairs with more pieces on a side",
    )
    add(
        "--timeout",
        type=integer(1, 86_400),
        default=30,
        help="seconds without an answer before a download fails",
    )
    return parser


def check_options(args: argparse.Namespace) -> None:
    """ValueError for what argparse cannot see."""
    if args.sample and args.own:
        raise ValueError("--own: cannot go with --sample, which reads no files")
    check_languages(args)
    if not args.own and {args.src, args.tgt} != {"de", "en"}:
        raise ValueError(f"--src {args.src} --tgt {args.tgt}: only de and en unless --own")


def prepare(args: argparse.Namespace) -> None:
    """Do what the options ask for, then report. ValueError, one line, where it cannot be done."""
    data = None if args.sample else args.data
    fetched = [] if args.sample or args.own else fetch(args.data, args.timeout)
    src_lines, tgt_lines = load_split(data, "train", args.src, args.tgt)
    counts = [f"train {len(src_lines):,}"]
    for split in ("val", "test") if args.sample else SPLITS[1:]:
        try:
            counts.append(f"{split} {len(load_split(data, split, args.src, args.tgt)[0]):,}")
        except ValueError as error:
            if not args.own or "no such file" not in str(error):  # own data needs no test split here
                raise
    tokenizer = Tokenizer.train([*src_lines, *tgt_lines], args.vocab_size)
    dataset = LangPairDataset(src_lines, tgt_lines, tokenizer, args.max_length)
    if not len(dataset):
        raise ValueError(
            f"--max-length {args.max_length}: no training pair is left; {dataset.dropped_long:,} are "
            f"longer and {dataset.dropped_empty:,} have an empty side"
        )
    say(f"data       {'built-in sample' if args.sample else args.data}, {len(fetched)} files fetched")
    say(f"sentences  {', '.join(counts)}; {args.src} to {args.tgt}")
    say(f"subwords   {tokenizer.vocab_size:,} pieces, learnt on train")
    report(dataset, len(src_lines), args.max_length)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        check_options(args)
        prepare(args)
    except ValueError as error:
        parser.error(str(error).replace("vocab_size=", "--vocab-size "))
    except KeyboardInterrupt:
        show_progress("")
        print("interrupted; files already fetched are kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_script(main)
