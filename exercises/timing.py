"""Question 1: the encoder runs once, the decoder once per token. Which takes the time, as the lengths grow?

A model of the chapter's sizes with random weights, which cannot say <eos>; batch 8. Times are never the same
twice: this is the one result that another run does not reproduce.
"""

from functools import partial

import torch
from torch import Tensor

from benchmarks.decode_time import endless_model
from exercises.common import Exercise
from exercises.pictures import STYLES
from model import KVCache, Transformer
from toolbox.figures import new_figure
from toolbox.measure import compare
from train import BOS_ID, NUM_OFFSET, evaluating

LENGTHS = (16, 64, 256, 1024)
SHORT = 16  # the length of the other side
WITHOUT_CACHE = 256  # up to this length decoding is also timed without the KV cache
BATCH, REPEATS = 8, 5


def encode(model: Transformer, src: Tensor) -> tuple[Tensor, Tensor]:
    with evaluating(model):
        return model.encode(src)


def decode(model: Transformer, memory: Tensor, src_mask: Tensor, steps: int, use_cache: bool = True) -> None:
    """`steps` greedy tokens, one by one, as train.greedy_decode does it, without the encoder."""
    tgt = torch.full((memory.size(0), 1), BOS_ID, device=memory.device)
    cache = KVCache(model.settings["num_layers"]) if use_cache else None
    with evaluating(model):
        for _ in range(steps):
            logits, _ = model.decode(tgt[:, -1:] if use_cache else tgt, memory, src_mask, cache)
            tgt = torch.cat([tgt, logits[:, -1:].argmax(-1)], dim=1)


def measure(device: torch.device) -> dict:
    """-> rows of source length, target length, and median milliseconds of every contender."""
    model = endless_model(max(*LENGTHS, SHORT), "manual", device)
    pairs = [("source", length, SHORT) for length in LENGTHS]
    pairs += [("target", SHORT, length) for length in LENGTHS]
    rows = []
    for grows, source, target in pairs:
        generator = torch.Generator().manual_seed(0)
        src = (torch.randint(10, (BATCH, source), generator=generator) + NUM_OFFSET).to(device)
        memory = encode(model, src)
        calls = {"encoder": partial(encode, model, src), "decoder": partial(decode, model, *memory, target)}
        if target <= WITHOUT_CACHE:
            calls["decoder, no KV cache"] = partial(decode, model, *memory, target, use_cache=False)
        times = compare(calls, REPEATS, 1, device, f"source {source}, target {target}")
        medians = {name: found["median_ms"] for name, found in times.items()}
        rows.append(dict(grows=grows, source=source, target=target, ms=medians))
    return dict(batch=BATCH, threads=torch.get_num_threads(), torch=torch.__version__, rows=rows)


def tables(results: dict, measured: dict) -> list[list[list[str]]]:
    """Median milliseconds for a batch."""
    found = measured[""][0]["rows"]
    rows = [["source length", "target length", *found[0]["ms"]]]
    for row in found:
        times = [f"{row['ms'][name]:,.1f}" if name in row["ms"] else "not timed" for name in found[0]["ms"]]
        rows.append([f"{row['source']:,}", f"{row['target']:,}", *times])
    return [rows]


def draw(results: dict, measured: dict):
    figure = new_figure(10.0, 4.2)
    rows = measured[""][0]["rows"]
    for axes, grows in zip(figure.subplots(1, 2, sharey=True), ("source", "target"), strict=True):
        chosen = [row for row in rows if row["grows"] == grows]
        for name, style in zip(rows[0]["ms"], STYLES, strict=False):
            points = [(row[grows], row["ms"][name]) for row in chosen if name in row["ms"]]
            axes.plot(*zip(*points, strict=True), label=name, **style)
        other = "target" if grows == "source" else "source"
        axes.set(xscale="log", yscale="log", xlabel=f"{grows} length ({other} {chosen[0][other]})")
        axes.set_xticks([row[grows] for row in chosen], [str(row[grows]) for row in chosen], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.axes[0].set_ylabel("ms for a batch")
    figure.suptitle("Time of encoder and decoder by length", size=11)
    return figure


EXERCISE = Exercise(
    "Question 1: time of encoder and decoder",
    measure=measure,
    tables=tables,
    draw=draw,
)
