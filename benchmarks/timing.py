"""What the benchmarks share: how they start, and contenders that take turns, with medians and ratios."""

import argparse
import statistics
from collections.abc import Callable

import torch

from mha_vs_sdpa import take_turns
from train import add_device_option, choose_device, choose_precision, device_name, say


def start(
    parser: argparse.ArgumentParser, argv: list[str] | None, check: Callable = lambda args: None
) -> tuple[argparse.Namespace, torch.device, str]:
    """Parse the options and --device, say what is measured on -> options, device, precision.

    `check` may refuse the options by a ValueError.
    """
    add_device_option(parser)
    args = parser.parse_args(argv)
    try:
        check(args)
        device = choose_device(args.device)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    precision, why = choose_precision("auto", device)
    say(f"device {device_name(device)}; {precision} ({why}); torch {torch.__version__}")
    return args, device, precision


def compare(
    calls: dict[str, Callable], repeats: int, warmup: int, device: torch.device, label: str
) -> dict[str, dict[str, float]]:
    """Time the calls in turns, print a line each -> name -> median and quartiles in milliseconds, and ratio.

    The ratio is how many times longer a call takes than the first one.
    """
    times = take_turns(calls, lambda: None, repeats, warmup, device, label)
    results = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        base = results[next(iter(times))]["median_ms"] if results else median
        results[name] = dict(median_ms=median, low_ms=low, high_ms=high, ratio=median / base)
        say(f"  {name:32}{median:>10,.1f} ms  ({low:,.1f} - {high:,.1f}){median / base:>8.2f} x")
    return results
