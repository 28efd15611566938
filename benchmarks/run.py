"""Every speed claim of the README, measured in one run of under ten minutes on two CPU cores.

Run from the project's folder: `python -m benchmarks.run`. Writes the numbers as JSON and draws one picture.
"""

import json
import time
from pathlib import Path

import torch

import mha_vs_sdpa
from benchmarks import decode_time, memory, recipes, step_time
from train import (
    ArgumentParser,
    add_device_option,
    choose_device,
    choose_precision,
    device_name,
    run_script,
    say,
)
from viz import check_picture, new_figure

SECTIONS = ("attention", "step", "decoding", "memory", "recipes")


def attention(
    device: torch.device,
    precision: str,
    batch: int = 8,
    length: int = 1024,
    d_model: int = 512,
    heads: int = 8,
) -> list[dict]:
    """The table of mha_vs_sdpa.py."""
    say(f"attention, B={batch}, L={length}, d_model={d_model}, h={heads}, causal:")
    modules = mha_vs_sdpa.make_contenders(d_model, heads, device)
    mha_vs_sdpa.check_equal(modules)
    x = torch.randn(batch, length, d_model, device=device, requires_grad=True)
    rows = mha_vs_sdpa.measure(modules, x, repeats=5, warmup=2, precision=precision)
    mha_vs_sdpa.print_table(rows)
    return rows


MEASURE = {
    "attention": attention,
    "step": lambda device, precision: step_time.measure(device, precision=precision),
    "decoding": lambda device, precision: decode_time.measure(device),
    "memory": memory.measure,
    "recipes": recipes.measure,
}


def draw(results: dict, path: Path) -> None:
    """A panel of bars for each section that was measured, the shorter the better."""
    panels = []  # title, names, values, unit
    if rows := results.get("attention"):
        rows = [row for row in rows if row["pass"] == "forward"]
        panels.append(
            (
                f"attention, forward, L = {rows[0]['length']}",
                {r["contender"]: r["median_ms"] for r in rows},
                "ms",
            )
        )
    if step := results.get("step"):
        panels.append(("training step", {name: row["median_ms"] for name, row in step.items()}, "ms"))
    for what, contenders in results.get("decoding", {}).items():
        if "64 tokens" in what:
            times = {name: row["median_ms"] for name, row in contenders.items()}
            panels.append((f"greedy decoding, {what}", times, "ms"))
    if rows := results.get("memory"):
        longest = max(rows, key=lambda row: row["length"])
        title = f"peak memory of a training step, batch {longest['batch']}, length {longest['length']}"
        panels.append((title, {"by hand": longest["manual"] / 1e6, "SDPA": longest["sdpa"] / 1e6}, "MB"))
    if both := results.get("recipes"):
        fast = sorted(row["seconds"] for row in both["fast"])[len(both["fast"]) // 2]
        panels.append(("training to 99.6 %", {"chapter": both["chapter"]["seconds"], "fast": fast}, "s"))
    heights = [len(values) for _, values, _ in panels]
    figure = new_figure(7.0, 0.5 + sum(0.32 * n + 0.55 for n in heights))
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[n + 0.5 for n in heights])[:, 0]
    for axis, (title, values, unit) in zip(axes, panels, strict=True):
        bars = axis.barh(list(values), list(values.values()), color="#4c78a8")
        axis.bar_label(bars, [f" {value:,.1f} {unit}" for value in values.values()], size=9)
        axis.invert_yaxis()
        axis.set_title(title, size=10, loc="left")
        axis.set_xlim(0, 1.2 * max(values.values()))
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="benchmarks.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="the parts to run")
    parser.add_argument("--json", type=Path, default="benchmarks.json", help="all numbers")
    parser.add_argument("--out", type=Path, default="benchmarks.png", help="picture")
    add_device_option(parser)
    args = parser.parse_args(argv)
    try:
        check_picture("--out", args.out)
        if args.json.is_dir() or not args.json.absolute().parent.is_dir():
            raise ValueError(f"--json {args.json}: must be a file in a folder that exists")
        device = choose_device(args.device)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    torch.set_float32_matmul_precision("high")
    precision, why = choose_precision("auto", device)
    say(f"device {device_name(device)}; {precision} ({why}); torch {torch.__version__}")
    results, start = {}, time.perf_counter()
    for section in args.only:
        results[section] = MEASURE[section](device, precision)
    seconds = time.perf_counter() - start
    settings = dict(device=device_name(device), precision=precision, torch=torch.__version__, seconds=seconds)
    args.json.write_text(json.dumps(settings | results, indent=1), encoding="utf-8")
    draw(results, args.out)
    say(f"wrote {args.json} and {args.out} after {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    run_script(main)
