"""Greedy decoding with and without the KV cache, short and long; beside transformers' `generate`.

The models have random weights and cannot say <eos>, so that all decode the same number of tokens. Run from
the project's folder: `python -m benchmarks.decode_time`.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import math
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers import bart
from model import PAD_ID, Transformer
from toolbox.command_line import ArgumentParser, integer, run_script, say
from toolbox.measure import compare, start_benchmark, without_tf32
from train import D_MODEL, EOS_ID, SEQ_LEN, VOCAB, greedy_decode, make_dataset

PRECISION = "fp32"  # of all decoding, here as in train.py: there is no autocast around it


def endless_model(max_len: int, attention: str, device: torch.device) -> Transformer:
    """The chapter's sizes with a longer position table, random weights, and no way to end."""
    torch.manual_seed(0)
    sizes = dict(d_model=D_MODEL, max_len=max_len, dropout=0.0, attention=attention)
    model = Transformer(VOCAB, VOCAB, **sizes).to(device).eval()
    with torch.no_grad():
        model.out_proj.bias[EOS_ID] = -1e9
    return model


def decode_all(model: Transformer, src: Tensor, tokens: int, use_cache: bool) -> Tensor:
    """src [n, Ls] -> ids [n, 1 + tokens], <bos> first."""
    return torch.cat([greedy_decode(model, part, tokens + 1, use_cache) for part in src.split(500)])


def measure(
    device: torch.device, strings: int = 1000, batch: int = 8, lengths: tuple = (64, 256, 1024),
    rounds: int = 3,
) -> dict:  # fmt: skip
    """-> what was timed -> contender -> median, quartiles, ratio. The outputs are compared first."""
    max_len = max(SEQ_LEN, *lengths) + 1
    manual, sdpa = (endless_model(max_len, attention, device) for attention in ("manual", "sdpa"))
    src, results = make_dataset(strings, seed=1)[0].to(device), {}
    cases = [(f"{strings:,} strings, 13 tokens", src, 13)]
    cases += [(f"{batch} strings, {length:,} tokens", src[:batch], length) for length in lengths]
    for what, ids, length in cases:
        calls = {"cache": partial(decode_all, manual, ids, length, True)}
        calls["cache, SDPA"] = partial(decode_all, sdpa, ids, length, True)
        if length <= 256:  # without a cache the longest would take minutes
            calls["no cache"] = partial(decode_all, manual, ids, length, False)
        with without_tf32():
            first, *others = (call() for call in calls.values())
        same = min((first == other).all(1).float().mean().item() for other in others)
        if same < (1.0 if device.type == "cpu" else 0.5):  # a GPU's kernels may round a tie another way
            raise RuntimeError(f"{what}: only {same:.1%} of the strings get the same tokens from all")
        if length == 64 and (peer := bart(manual.settings)) is not None:
            options = dict(num_beams=1, do_sample=False, min_new_tokens=length, max_new_tokens=length)
            options |= dict(attention_mask=(ids != PAD_ID).long(), use_cache=True)
            calls["transformers Bart, cache, SDPA"] = partial(peer.to(device).generate, ids, **options)
        say(f"greedy decoding, {what}, {PRECISION}:")
        results[what] = compare(calls, rounds, warmup=1, device=device, label=what)
    short, long = (results[what]["cache"]["median_ms"] for what, _, _ in (cases[1], cases[-1]))
    power = math.log(long / short) / math.log(lengths[-1] / lengths[0])
    say(f"  with the cache, from {lengths[0]} to {lengths[-1]:,} tokens time grows as length^{power:.2f}")
    return results | {"growth_power": power}


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="benchmarks.decode_time", description=__doc__)
    parser.add_argument("--rounds", type=integer(2), default=3, help="timed calls of each contender")
    args, device, _ = start_benchmark(parser, argv, precision=PRECISION)
    measure(device, rounds=args.rounds)
    return 0


if __name__ == "__main__":
    run_script(main)
