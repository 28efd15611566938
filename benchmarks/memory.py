"""Peak memory of one training step by length and by batch, attention by hand against SDPA.

No dropout: with it, PyTorch's CPU kernel falls back to attention by hand. Run from the project's folder:
`python -m benchmarks.memory`.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

from functools import partial

import torch

from model import Transformer
from toolbox.command_line import ArgumentParser, run_script, say, show_progress
from toolbox.measure import peak_bytes, start_benchmark
from train import D_MODEL, RECIPES, VOCAB, make_optimizer, train_step


def step_peak(attention: str, batch: int, length: int, device: torch.device, precision: str) -> int | None:
    """Most bytes alive in a training step on [batch, length] ids, beyond weights and optimizer state."""
    torch.manual_seed(0)
    sizes = dict(d_model=D_MODEL, max_len=length, dropout=0.0, attention=attention)
    model = Transformer(VOCAB, VOCAB, **sizes).to(device).train()
    ids = torch.randint(3, VOCAB, (batch, length), device=device)
    call = partial(train_step, model, *make_optimizer(model, RECIPES["chapter"]), ids, ids, precision)
    call()  # the first step also makes the optimizer's state
    model.zero_grad(set_to_none=True)
    return peak_bytes(call, device)


def measure(
    device: torch.device, precision: str = "fp32", lengths: tuple = (64, 128, 256, 512),
    batches: tuple = (4, 8, 16, 32),
) -> list[dict]:  # fmt: skip
    """-> rows of batch, length, peak bytes by hand and through SDPA.

    All lengths at the second batch size, then the other batch sizes at the second length.
    """
    say("peak memory of a training step, MB = 10^6 bytes, beyond weights and optimizer state:")
    say(f"  {'batch':>5}{'length':>8}{'by hand':>11}{'SDPA':>11}{'ratio':>8}")
    shapes = [(batches[1], length) for length in lengths]
    shapes += [(batch, lengths[1]) for batch in batches if batch != batches[1]]
    rows = []
    for batch, length in shapes:
        show_progress(f"memory, batch {batch}, length {length}")
        row = dict(batch=batch, length=length)
        for attention in ("manual", "sdpa"):
            row[attention] = step_peak(attention, batch, length, device, precision)
        rows.append(row)
        show_progress("")
        manual, sdpa = row["manual"] / 1e6, row["sdpa"] / 1e6
        say(f"  {batch:>5}{length:>8}{manual:>11,.1f}{sdpa:>11,.1f}{manual / sdpa:>8.2f}")
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="benchmarks.memory", description=__doc__)
    _, device, precision = start_benchmark(parser, argv)
    measure(device, precision)
    return 0


if __name__ == "__main__":
    run_script(main)
