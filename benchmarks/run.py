"""All benchmarks of docs/speed.md in one run, under ten minutes on two CPU cores.

Run from the project's folder: `python -m benchmarks.run`. Writes the numbers as JSON and draws one picture.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import mha_vs_sdpa
from benchmarks import decode_time, memory, recipes, step_time
from toolbox.command_line import ArgumentParser, run_script, say
from toolbox.device import device_name
from toolbox.figures import check_picture, new_figure, save_figure
from toolbox.files import check_outputs, file_name, reason, write_text
from toolbox.measure import start_benchmark


def attention(
    device: torch.device, precision: str, batch: int = 8, length: int = 1024, d_model: int = 512,
    heads: int = 8,
) -> list[dict]:  # fmt: skip
    """The rows of mha_vs_sdpa.py's table."""
    say(f"attention, B={batch}, L={length}, d_model={d_model}, h={heads}, causal:")
    mha = mha_vs_sdpa.make_attention(d_model, heads, device)
    mha_vs_sdpa.check_equal(mha)
    x = torch.randn(batch, length, d_model, device=device, requires_grad=True)
    rows = mha_vs_sdpa.measure(mha, x, repeats=5, warmup=2, precision=precision)
    mha_vs_sdpa.print_table(rows)
    return rows


MEASURE = {
    "attention": attention,
    "step": lambda device, precision, **sizes: step_time.measure(device, precision=precision, **sizes),
    "decoding": lambda device, precision, **sizes: decode_time.measure(device, **sizes),
    "memory": memory.measure,
    "recipes": recipes.measure,
}


def own_precision(section: str, precision: str) -> str:
    """In which precision a section computes where the others use `precision`."""
    return decode_time.PRECISION if section == "decoding" else precision


def bar_panels(results: dict) -> list[tuple[str, dict[str, float], str]]:
    """-> title, contender -> value, unit, of everything that is a comparison of times."""
    panels = []
    if rows := results.get("attention"):
        forward = {row["contender"]: row["median_ms"] for row in rows if row["pass"] == "forward"}
        panels.append((f"attention, forward, L = {rows[0]['length']}", forward, "ms"))
    if step := results.get("step"):
        panels.append(("training step", {name: row["median_ms"] for name, row in step.items()}, "ms"))
    for what, contenders in results.get("decoding", {}).items():
        if "64 tokens" in what:
            times = {name: row["median_ms"] for name, row in contenders.items()}
            panels.append((f"greedy decoding, {what}", times, "ms"))
    if both := results.get("recipes"):
        fast = statistics.median(row["seconds"] for row in both["fast"])
        panels.append(("training to 99.6 %", {"chapter": both["chapter"]["seconds"], "fast": fast}, "s"))
    return panels


def draw(results: dict, path: Path) -> None:
    """Bars for the times; below them, as lines, the memory of a training step by length and by batch size."""
    panels, memory_rows = bar_panels(results), results.get("memory", [])
    heights = [0.32 * len(values) + 0.55 for _, values, _ in panels]  # inches
    figure = new_figure(7.0, sum(heights) + 2.8)
    above, below = figure.subfigures(2, 1, height_ratios=[sum(heights) or 0.1, 2.8])
    grid = above.add_gridspec(len(panels) or 1, 1, height_ratios=heights or [1])
    for place, (title, values, unit) in zip(grid, panels, strict=False):
        axes = above.add_subplot(place)
        bars = axes.barh(list(values), list(values.values()), color="#4c78a8")
        axes.bar_label(bars, [f" {value:,.1f} {unit}" for value in values.values()], size=9)
        axes.invert_yaxis()
        axes.set_title(title, size=10, loc="left")
        axes.set_xlim(0, 1.2 * max(values.values()))
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    sides = ((1, "length", "batch"), (2, "batch", "length")) if memory_rows else ()
    for number, varied, fixed in sides:
        axes = below.add_subplot(1, 2, number)
        values = [row[fixed] for row in memory_rows]
        usual = max(set(values), key=values.count)
        rows = sorted((row for row in memory_rows if row[fixed] == usual), key=lambda row: row[varied])
        for name, key, style in (("by hand", "manual", "o-"), ("SDPA", "sdpa", "s--")):
            axes.plot([row[varied] for row in rows], [row[key] / 1e6 for row in rows], style, label=name)
        axes.set_title(f"memory of a training step, {fixed} {usual}", size=10, loc="left")
        axes.set(xlabel=varied, ylabel="peak, MB", ylim=(0, None))
        axes.legend()
    save_figure(figure, path, dpi=150)


def check_files(args: argparse.Namespace) -> None:
    """ValueError, before minutes of measuring, when the results could not be written."""
    check_picture("--out", args.out)
    check_outputs([("--json", args.json, "JSON file"), ("--out", args.out, "picture")])


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="benchmarks.run", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASURE, default=[*MEASURE], help="the parts to run")
    parser.add_argument("--json", type=file_name, default="benchmarks.json", help="all numbers")
    parser.add_argument("--out", type=file_name, default="benchmarks.png", help="picture")
    args, device, precision = start_benchmark(parser, argv, check_files)
    results, began = {}, time.perf_counter()
    for section in args.only:
        results[section] = MEASURE[section](device, precision)
    seconds = time.perf_counter() - began
    precisions = {section: own_precision(section, precision) for section in args.only}
    settings = dict(
        device=device_name(device), precision=precisions, torch=torch.__version__, seconds=seconds
    )
    try:
        write_text(args.json, json.dumps(settings | results, indent=1))
        draw(results, args.out)
    except OSError as error:
        print(f"benchmarks.run: error: cannot write the results ({reason(error)})", file=sys.stderr)
        return 2
    say(f"wrote {args.json} and {args.out} after {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    run_script(main)
