"""Proves or refutes on a GPU everything this project says about GPUs, in under nine minutes.

Run from the project's folder: `python -m benchmarks.gpu_check`. The JSON file is written after every part, so
that a run that breaks off still tells; at the end the README's tables are printed in Markdown, and every
claim that does not hold. Exit status 0: all hold; 1: some do not, or a part broke; 2: nothing was checked.

`--dry-run` goes through every part on the CPU with tiny sizes: its figures mean nothing.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import argparse
import json
import tempfile
import time
import traceback
from pathlib import Path

import torch

from benchmarks.gpu_parts import PARTS, Setting, guarded
from benchmarks.gpu_table import report
from toolbox.command_line import ArgumentParser, number, run_script, say
from toolbox.device import choose_device, choose_precision
from toolbox.files import check_output, file_name, reason, write_text


def check_all(args: argparse.Namespace, setting: Setting) -> dict:
    """Every part asked for -> name -> what it found; one that fails says how, and the next one follows."""
    results, began = {}, time.perf_counter()
    for name in args.only:
        start = time.perf_counter()
        say(f"== {name}, after {start - began:.0f} s")
        if start - began > 60 * args.minutes:
            results[name] = dict(left_out=f"--minutes {args.minutes:g} are over")
        else:
            try:
                results[name] = guarded(PARTS[name], setting)
            except (Exception, SystemExit) as error:  # whatever it is, the others are worth having
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                results[name] = dict(error=text, traceback=traceback.format_exc())
        results[name]["seconds"] = time.perf_counter() - start
        document = dict(dry_run=setting.tiny, seconds=time.perf_counter() - began, parts=results)
        write_text(args.json, json.dumps(document, indent=1, default=str))
    return results


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, torch.device]:
    parser = ArgumentParser(prog="benchmarks.gpu_check", description=__doc__)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="every part on the CPU with tiny sizes")
    add("--only", nargs="+", choices=PARTS, default=[*PARTS], help="the parts to run")
    add("--minutes", type=number(0, 600), default=9.0, help="after these no further part begins")
    add("--json", type=file_name, default="gpu_check.json", help="all that was found")
    args = parser.parse_args(argv)
    try:
        check_output("--json", args.json, "JSON file")
        device = choose_device("cpu" if args.dry_run else "cuda")
    except ValueError as error:
        parser.error(str(error).replace("use cpu or auto", "--dry-run needs none"))
    return args, device


def main(argv: list[str] | None = None) -> int:
    args, device = parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(device, choose_precision("auto", device)[0], args.dry_run, Path(folder))
            results = check_all(args, setting)
    except OSError as error:
        print(f"benchmarks.gpu_check: error: --json {args.json}: {reason(error)}", file=sys.stderr)
        return 2
    if args.dry_run:
        say("dry run on the CPU with tiny sizes: none of these figures means anything")
    say(report(results))
    say(f"wrote {args.json}")
    found = results.values()
    return int(any("error" in part or not all(part.get("claims", {}).values()) for part in found))


if __name__ == "__main__":
    run_script(main)
