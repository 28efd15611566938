"""Time and memory, measured fairly: contenders take turns in one run, medians and ratios come out."""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from toolbox.command_line import say, show_progress
from toolbox.device import add_device_option, choose_device, choose_precision, device_name


class NotEqual(RuntimeError):
    """Two contenders disagree; the message is one line that says where and by how much."""


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Over all entries of all pairs of tensors; NaN if there is one anywhere."""
    return torch.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)]).max().item()


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Within: fp32 products in full, so that a difference between two ways is a mistake and not rounding."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def out_of_memory(error: RuntimeError) -> bool:
    """The CPU's allocator raises a plain RuntimeError; only its text tells."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "tried to allocate" in text or "overflow" in text


def attempt(call: Callable[[], object]) -> object | None:
    """What call() returns, or None when memory ran out, with the failed call's tensors gone."""
    try:
        return call()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    if torch.cuda.is_available():  # here, not above: until the except block ends, the error holds the tensors
        torch.cuda.empty_cache()
    return None


# --------------------------------------------------------------------------------------------------- memory


def traced(call: Callable[[], object], memory: bool = False, gpu: bool = False) -> profile:
    """PyTorch's record of what ran on the host during call(), if wanted with allocations, a GPU's kernels."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some builds of torch announce each profile on stderr
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + gpu]
    with profile(activities=activities, profile_memory=memory) as trace:
        call()
        if gpu:
            torch.cuda.synchronize()
    return trace


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes of tensors alive at once during call(), beyond those alive before; None if unknown.

    On a GPU its allocator keeps the count. On the CPU each allocation and release is read from a profile and
    summed; scratch space inside the math library is not a tensor and not seen. Call it once before: a first
    call also sets up workspaces.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    trace = traced(call, memory=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            trace.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError):  # the disk is full: no file, or half of one
        return None
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    alive = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        alive += change
        peak = max(peak, alive)
    return peak if changes else None


def sdpa_kernels(call: Callable[[], object]) -> list[str]:
    """The operators behind `F.scaled_dot_product_attention` that really ran in call(), from a profile."""
    names = {event.key for event in traced(call).key_averages()}
    return sorted(n for n in names if n.startswith("aten::_scaled_dot_product_") and "backward" not in n)


# ----------------------------------------------------------------------------------------------------- time


WARM_UP = 0.5  # seconds that a GPU is kept busy before anything counts: at rest it is slower
FILLS = 16  # of 256 MB, more than any L2 cache: 1 ms on the fastest cards, 4 ms on an RTX 4090


def give_head_start(device: torch.device) -> None:
    """Keep the GPU busy for some milliseconds, and empty its L2 cache, while Python queues what follows."""
    cover = torch.empty(2**28, dtype=torch.uint8, device=device)
    for _ in range(FILLS):
        cover.zero_()


def milliseconds(call: Callable[[], object], device: torch.device, head_start: bool = False) -> float:
    """Duration of one call. A GPU works behind Python's back, so events in its own queue hold the clock.

    head_start: leave out the time that Python needs to launch the kernels, as long as it is shorter than the
    head start. Otherwise it counts, as in any loop whose GPU waits for Python.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if head_start:
        give_head_start(device)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def take_turns(
    calls: dict[str, Callable], clear: Callable, repeats: int, warmup: int, device: torch.device, label: str,
    head_start: bool = False,
) -> dict[str, list[float]]:  # fmt: skip
    """Milliseconds of `repeats` calls per contender, after `warmup` that do not count; see `milliseconds`.

    The contenders alternate and each round turns the order round (A B, B A, A B ...): a machine that slows
    down slows all alike. One that runs out of memory drops out and is missing from the result. With a head
    start a GPU's warm-up goes on for WARM_UP seconds; without, every call is made exactly as often as asked.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    number, began = 0, time.perf_counter()
    while number < warmup + repeats:
        show_progress(f"{label}: round {number + 1}/{warmup + repeats}")
        for name in list(times) if number % 2 == 0 else list(times)[::-1]:
            clear()
            elapsed = attempt(partial(milliseconds, calls[name], device, head_start))
            if elapsed is None:
                del times[name]
            elif number >= warmup:
                times[name].append(elapsed)
        number += 1
        resting = head_start and device.type == "cuda" and time.perf_counter() - began < WARM_UP
        warmup += number == warmup and resting  # one more round that does not count
    show_progress("")
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Two or more values -> lower quartile, median, upper quartile."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def compare(
    calls: dict[str, Callable], repeats: int, warmup: int, device: torch.device, label: str
) -> dict[str, dict[str, float]]:
    """Time the calls in turns, print a line each -> name -> median and quartiles in milliseconds, and ratio.

    The ratio is how many times longer a call takes than the first one.
    """
    times = take_turns(calls, lambda: None, repeats, warmup, device, label)
    results = {}
    for name, values in times.items():
        low, median, high = quartiles(values)
        base = results[next(iter(times))]["median_ms"] if results else median
        results[name] = dict(median_ms=median, low_ms=low, high_ms=high, ratio=median / base)
        say(f"  {name:32}{median:>10,.1f} ms  ({low:,.1f} - {high:,.1f}){median / base:>8.2f} x")
    return results


def start_benchmark(
    parser: argparse.ArgumentParser, argv: list[str] | None, check: Callable = lambda args: None,
    precision: str = "auto",
) -> tuple[argparse.Namespace, torch.device, str]:  # fmt: skip
    """Parse the options and --device, say what is measured on -> options, device, precision.

    `check` may refuse the options by a ValueError. precision: as in `choose_precision`.
    """
    add_device_option(parser)
    args = parser.parse_args(argv)
    try:
        check(args)
        device = choose_device(args.device)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    precision, why = choose_precision(precision, device)
    say(f"device {device_name(device)}; {precision} ({why}); torch {torch.__version__}")
    return args, device, precision
