"""Train the German-English translator, score it by free-running BLEU, keep the best.

Run from the project's folder:

python -m translation.train --sample      the 160 built-in pairs, under a minute, no network
python -m translation.train               Multi30k from ./multi30k, see translation.prepare
python -m translation.train --resume      goes on where the run stopped, in mid-epoch too

A run's folder, runs/PRESET or --out, holds

    last.pt         all that --resume needs; on the CPU a resumed run ends with exactly the same weights
    best.pt         weights with the highest validation BLEU (lowest loss, as long as none was measured)
    epoch-NN.pt     weights after each of the last --average epochs; averaged.pt, their mean, at the end
    tokenizer.model the subwords, also inside every checkpoint; log.txt; tensorboard/; train.ids, val.ids

With several GPUs or machines, the same script under torchrun, for instance

torchrun --nproc-per-node 4 -m translation.train

where each process takes a batch of its own of at most --max-tokens; --out must be a folder they all see.
"""

import sys

if not __package__:  # run by its path: imports begin in the project's folder
    sys.path.insert(0, f"{sys.path[0]}/..")

import argparse
import contextlib
import math
import os
import re
import threading
import time

import torch
from torch import Tensor

from model import PAD_ID, Transformer
from toolbox.command_line import option_name, run_script, say
from toolbox.files import reason
from train import evaluating
from train import loss_sum as loss_sum_at_once
from translation.bleu import corpus_bleu
from translation.checkpoint import average, read_run
from translation.curves import Curves, open_tensorboard, quiet_thread
from translation.data import LangPairDataset, TransformerBatchSampler, collate
from translation.decode import translate_lines
from translation.distributed import (
    OneOfMany,
    any_of,
    from_first,
    process_group,
    rank,
    started,
    summed,
    world_size,
)
from translation.interrupt import Interrupted, catching_interrupt, check_stop
from translation.options import build_parser, parse_args
from translation.reinforce import WEIGHT, add_samples, advantage_loss, sentence_bleu
from translation.run import Run, stale

LOSS_CHUNK = 2**22  # logits the loss takes at a time: 16 MB, where a batch has 80
STOP_EVERY = 20  # updates after which the loss is looked at, and several processes ask whether to stop
SHOWN = 3  # translations printed at the end


# ----------------------------------------------------------------------------------------------- one update


def loss_sum(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """`loss_sum` of the main train.py, piece by piece: with a vocabulary of 8,000 the logits are large.

    logits [B, Lt, V] of any dtype, labels [B, Lt] -> summed cross-entropy in nats, fp32; PAD counts 0.
    ValueError when the shapes do not go together.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {list(logits.shape)} do not score labels {list(labels.shape)}")
    rows = max(1, LOSS_CHUNK // logits.size(-1))
    pieces = zip(logits.flatten(0, 1).split(rows), labels.flatten().split(rows), strict=True)
    return sum(loss_sum_at_once(piece, gold, smoothing) for piece, gold in pieces)


def load_batch(dataset: LangPairDataset, rows: list[int], device: torch.device) -> dict[str, Tensor]:
    """These rows of the dataset as a batch of `collate` on `device`; does not wait for a GPU still busy."""
    batch, gpu = collate([dataset[i] for i in rows]), device.type == "cuda"
    return {n: (ids.pin_memory() if gpu else ids).to(device, non_blocking=gpu) for n, ids in batch.items()}


def train_step(
    model, optimizer, scheduler, batch: dict[str, Tensor], precision: str, smoothing: float, clip: float
) -> tuple[Tensor, Tensor]:
    """One update on a batch of `collate` -> float64 [2]: summed smoothed loss and real tokens; gradient norm.

    The loss is the mean over the batch's real tokens, those of all processes together; what comes back
    counts them all too. The norm is taken before clipping to `clip`. Rows that `add_samples` has added take
    part by their advantage, and are not counted.
    """
    with torch.autocast(batch["src"].device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(batch["src"], batch["tgt_in"])
    labels, advantage = batch["labels"], batch.get("advantage")
    pairs = len(labels) - (0 if advantage is None else len(advantage))
    total, tokens = loss_sum(logits[:pairs], labels[:pairs], smoothing), (labels[:pairs] != PAD_ID).sum()
    counted = summed(torch.stack([total.detach().double(), tokens.double()]))
    if advantage is not None:
        total = total + WEIGHT * advantage_loss(logits[pairs:], labels[pairs:], advantage)
    optimizer.zero_grad(set_to_none=True)
    # `backward` takes the mean over the processes: times their number it is the sum. No tokens: 0, not 0 / 0.
    (total * world_size() / counted[1].float().clamp(min=1)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scheduler.step()
    return counted, norm


# ------------------------------------------------------------------------------------------------- the loop


def train(args: argparse.Namespace, checkpoint: dict | None) -> int:
    """The whole run -> exit status. ValueError, one line, where it cannot be done."""
    with contextlib.ExitStack() as hold:
        return train_run(Run(args, checkpoint, hold))


def train_run(run: Run) -> int:
    """Train, finish and close a run -> exit status."""
    run.describe()
    with quiet_thread(), contextlib.closing(open_curves(run)) as curves:
        try:
            with catching_interrupt(run.stop):
                train_epochs(run, curves)
                try:
                    if rank() == 0:
                        finish(run)
                finally:
                    from_first(None)  # all leave together
        except Interrupted:
            if rank() == 0:
                out = run.args.out
                say(f"interrupted after {run.updates:,} updates: --resume --out {out} goes on from there")
            return 130
    return 0


def open_curves(run: Run) -> Curves:
    """Rank 0's curves, or none where they cannot be."""
    writer = None
    if rank() == 0:
        try:
            writer = open_tensorboard(run.args.out / "tensorboard", run.updates + 1)
            why = "pip install tensorboard"
        except OSError as error:
            why = f"tensorboard cannot be written ({reason(error)})"
        if writer is None:
            run.log(f"curves   none: {why}")
    return Curves(writer)


def train_epochs(run: Run, curves: Curves) -> None:
    """Every epoch still to come. Interrupted by Ctrl-C, once all is saved."""
    args = run.args
    try:
        while run.epoch < args.epochs and not (args.patience and stale(run.history) >= args.patience):
            run.forget_average()
            train_epoch(run, curves)
            end_epoch(run, curves)
    except Interrupted:
        run.save()
        raise
    if run.epoch < args.epochs:
        run.log(f"stopped after epoch {run.epoch}: no new best in {args.patience} scores (--patience)")


def train_epoch(run: Run, curves: Curves) -> None:
    """Train on the rest of this epoch's batches. Interrupted, after a whole update, by Ctrl-C."""
    from tqdm import tqdm  # here, so that importing this module does not need it

    args = run.args
    run.model.train()
    run.plan_cooldown()
    reward = sentence_bleu(run.tokenizer) if run.on_bleu else None
    if reward and not run.position:
        run.optimizer.state.clear()  # Adam's running means are those of another loss
    batches = list(run.sampler)[: args.bleu_updates if run.on_bleu else None]
    curves.restart()
    label, hidden = f"epoch {run.epoch + 1}/{args.epochs}", rank() > 0 or not sys.stderr.isatty()
    place = dict(total=len(batches), initial=run.position)
    mark = time.perf_counter()
    loaded = (load_batch(run.sets["train"], rows, run.device) for rows in batches[run.position :])
    batch = next(loaded, None)
    todo = tqdm(batches[run.position :], desc=label, leave=False, disable=hidden, **place)
    with contextlib.closing(todo):
        for _ in todo:
            lr = run.scheduler.get_last_lr()[0]
            if reward:
                with torch.autocast(run.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                    batch = add_samples(batch, run.model, reward)
            counted, norm = train_step(
                run.parallel, run.optimizer, run.scheduler, batch, args.precision, args.smoothing, args.clip
            )
            batch = next(loaded, None)  # prepared while a GPU still works: what follows may wait for it
            run.totals += counted
            run.position += 1
            mark = run.tick(mark)
            curves.add_update(run.updates, counted, lr, norm)
            if run.updates % STOP_EVERY == 0:
                run.check_finite()
            if args.save_every and run.updates % args.save_every == 0:
                run.save()
            if (world_size() == 1 or run.updates % STOP_EVERY == 0) and any_of(run.stop.is_set()):
                raise Interrupted
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    run.tick(mark)


def end_epoch(run: Run, curves: Curves) -> None:
    """Validate, write the epoch's files, print its line. Interrupted, with nothing written, by Ctrl-C."""
    run.check_finite()
    row = None
    if rank() == 0:
        with contextlib.suppress(Interrupted):
            row = measure(run)
    row = from_first(row)
    if row is None:
        raise Interrupted
    best = run.end_epoch(row)
    if rank():
        return
    bleu = "" if row["bleu"] is None else f"BLEU {row['bleu']:.2f}  "
    run.log(
        f"epoch {row['epoch']:2}  train loss {row['train_loss']:.4f}  val loss {row['val_loss']:.4f}  "
        f"ppl {row['perplexity']:.2f}  {bleu}lr {row['lr']:.2e}  {row['tokens_per_second']:,.0f} tokens/s  "
        f"{row['seconds']:.1f} s{'  best' if best else ''}"
    )
    curves.add_epoch(row, run.model, run.tokenizer, run.lines["val"][0][run.sets["val"].kept[0]])


# ----------------------------------------------------------------------------------------------- validation


def validation_loss(
    model: Transformer, dataset: LangPairDataset, max_tokens: int, device: torch.device,
    precision: str = "fp32", stop: threading.Event | None = None,
) -> float:  # fmt: skip
    """Mean loss per real token in nats, teacher-forced, no smoothing, no dropout; the mode is given back.

    Interrupted when `stop` is set meanwhile.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with evaluating(model):
        for rows in TransformerBatchSampler(dataset.lengths, max_tokens, shuffle=False):
            check_stop(stop)
            batch = load_batch(dataset, rows, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(batch["src"], batch["tgt_in"])
            tokens = (batch["labels"] != PAD_ID).sum()
            totals += torch.stack([loss_sum(logits, batch["labels"]).double(), tokens])
    loss, tokens = totals.tolist()
    return loss / tokens


def greedy_translate(model, tokenizer, lines, stop: threading.Event | None = None) -> list[str]:
    """`translate_lines` without a beam. Interrupted when `stop` is set meanwhile."""
    return translate_lines(model, tokenizer, lines, beam=1, report=lambda done: check_stop(stop))


def validation_bleu(run: Run) -> tuple[float, str]:
    """Free-running greedy BLEU on the validation lines, and its signature. Interrupted as above."""
    sources, references = run.lines["val"]
    return corpus_bleu(greedy_translate(run.model, run.tokenizer, sources, run.stop), references)


def measure(run: Run) -> dict:
    """The numbers of the epoch just trained. Interrupted when Ctrl-C was pressed meanwhile."""
    args, start = run.args, time.perf_counter()
    loss, tokens = run.totals.tolist()
    row = dict(epoch=run.epoch + 1, updates=run.updates, train_loss=loss / tokens)
    val_loss = validation_loss(
        run.model, run.sets["val"], args.max_tokens, run.device, args.precision, run.stop
    )
    row |= dict(val_loss=val_loss, perplexity=math.exp(min(val_loss, 700)), bleu=None)
    if args.bleu_every and row["epoch"] % args.bleu_every == 0:
        row["bleu"] = validation_bleu(run)[0]
    row["lr"] = run.scheduler.get_last_lr()[0]
    row["tokens_per_second"] = tokens / run.seconds
    row["seconds"] = run.seconds + time.perf_counter() - start
    return row


def finish(run: Run) -> None:
    """Write averaged.pt, score it beside best.pt, show translations by the better of the two."""
    out, paths = run.args.out, [path for path in run.last_epochs() if path.is_file()]
    if paths:
        run.model.load_state_dict(average(paths))  # through the model: shared matrices stay one
        run.write_weights("averaged.pt")
        run.log(f"averaged {len(paths)} epochs: {', '.join(path.name for path in paths)}")
    chosen, top = "best.pt", -1.0
    for name in ("best.pt", "averaged.pt"):
        if run.args.bleu_every and (out / name).is_file():
            run.model.load_state_dict(read_run(out / name)["model"])
            score, signature = validation_bleu(run)
            run.log(f"{name}: validation BLEU {score:.2f}, free-running greedy ({signature})")
            if score > top:
                chosen, top = name, score
    run.model.load_state_dict(read_run(out / chosen)["model"])
    show_translations(run, chosen)
    say(f"wrote {out}")


def show_translations(run: Run, name: str) -> None:
    """The first sentences of both splits, by the model as it is now; name: of the file it came from."""
    for title, split in (("seen in training", "train"), ("validation", "val")):
        say(f"{title}, by {name}:")
        sources, references = (side[:SHOWN] for side in run.lines[split])
        outputs = greedy_translate(run.model, run.tokenizer, sources, run.stop)
        for source, reference, output in zip(sources, references, outputs, strict=True):
            say(f"  source     {source}\n  reference  {reference}\n  output     {output}")


# --------------------------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    try:
        args, checkpoint = parse_args(parser, argv)
        with process_group(args.device):  # by now every process has seen --out as it was
            return train(args, checkpoint)
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: pip install -r translation/requirements.txt")
    except ValueError as error:
        if started() > 1 and os.environ["RANK"] != "0" and not isinstance(error, OneOfMany):
            return 2  # rank 0 says the same
        parser.error(re.sub(r"\b([a-z_]+)=", lambda m: f"{option_name(m[1])} ", " ".join(str(error).split())))


if __name__ == "__main__":
    run_script(main)
