"""What the benchmarks share: contenders that take turns, and the medians and ratios that are printed."""

import statistics
from collections.abc import Callable

import torch

from mha_vs_sdpa import take_turns
from train import say


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
