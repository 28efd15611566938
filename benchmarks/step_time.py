"""One training step of the chapter's recipe: model.py beside the same model made of `nn.Transformer`.

Same sizes, same batches, same optimizer, same `train.train_step`; the two alternate in one run. Run from the
project's folder: `python -m benchmarks.step_time`.
"""

import statistics

import torch

from benchmarks.torch_twin import TorchTransformer
from mha_vs_sdpa import take_turns
from model import Transformer
from train import (
    ADAM,
    SEQ_LEN,
    VOCAB_SIZE,
    ArgumentParser,
    add_device_option,
    choose_device,
    choose_precision,
    device_name,
    integer,
    make_dataset,
    noam_lambda,
    run_script,
    say,
    train_step,
)


def training_step(model: torch.nn.Module, device: torch.device, batch_size: int, precision: str):
    """-> a function that makes one update of `model` on the next batch of the chapter's data."""
    model = model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), fused=True, **ADAM)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, noam_lambda(128, 1000))
    src, tgt = (ids.to(device).split(batch_size) for ids in make_dataset(20 * batch_size, seed=0))
    count = 0

    def step() -> None:
        nonlocal count
        train_step(model, optimizer, scheduler, src[count % 20], tgt[count % 20], precision)
        count += 1

    return step


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="benchmarks.step_time", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=integer(2), default=50, help="timed steps of each model")
    parser.add_argument("--batch-size", type=integer(1), default=64, help="strings per step")
    add_device_option(parser)
    args = parser.parse_args(argv)
    try:
        device = choose_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    torch.set_float32_matmul_precision("high")
    precision, why = choose_precision("auto", device)
    torch.manual_seed(0)
    ours = Transformer(VOCAB_SIZE, VOCAB_SIZE, max_len=SEQ_LEN)
    contenders = {"model.py": ours, "nn.Transformer": TorchTransformer(ours.settings)}
    steps = {name: training_step(m, device, args.batch_size, precision) for name, m in contenders.items()}
    times = take_turns(steps, args.rounds, warmup=5, device=device, label="training step")
    median = {name: statistics.median(values) for name, values in times.items()}
    say(f"device {device_name(device)}; {precision} ({why})")
    say(f"batch {args.batch_size}; {args.rounds} steps each, in turns, after 5 to warm up")
    for name, value in median.items():
        low, _, high = statistics.quantiles(times[name], n=4, method="inclusive")
        say(f"{name:15} median {value:7.2f} ms   quartiles {low:.2f} - {high:.2f} ms")
    say(f"model.py takes {median['model.py'] / median['nn.Transformer']:.2f} of nn.Transformer's time")
    return 0


if __name__ == "__main__":
    run_script(main)
