"""A training run: its text, its model, how far it has come, and the files of its folder."""

import argparse
import contextlib
import importlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

from model import Transformer
from toolbox.checkpoint import CheckpointError, restore, training_state, write_checkpoint
from toolbox.command_line import say
from toolbox.device import device_name
from toolbox.files import held, reason
from train import ADAM, noam_lambda
from translation.bleu import need_sacrebleu
from translation.checkpoint import pack_tokenizer, unpack_tokenizer
from translation.data import LangPairDataset, Tokenizer, TransformerBatchSampler, fingerprint
from translation.distributed import from_all, parallel, rank, world_size
from translation.prepare import load_split

MODEL_OPTIONS = (
    "d_model", "num_heads", "dff", "num_layers", "dropout", "activation", "share_embeddings", "tie_output",
)  # fmt: skip


BLEU_RATE = 0.6  # of the learning rate without a cooldown: that of the first of --bleu-updates

# ---------------------------------------------------------------------------------------- model and optimiser


def choose_attention(name: str, device: torch.device) -> str:
    """--attention -> "manual" or "sdpa"."""
    if name != "auto":
        return name
    return "manual" if device.type == "cpu" else "sdpa"


def make_model(args: argparse.Namespace, vocab_size: int, device: torch.device) -> Transformer:
    """The untrained model of translation.train's options, on `device`."""
    options = {name: getattr(args, name) for name in MODEL_OPTIONS}
    options |= dict(norm_first=args.norm == "pre", max_len=args.max_length + 2)  # <bos> and <eos>
    attention = choose_attention(args.attention, device)
    return Transformer(vocab_size, vocab_size, attention=attention, **options).to(device)


def make_optimizer(
    model: Transformer, warmup: int, factor: float, left: Callable[[int], float] = lambda step: 1.0
) -> tuple[torch.optim.Adam, LambdaLR]:
    """Adam and `factor` times the Noam schedule, times `left` of an update. ValueError when warmup < 1.

    Noam's own rate falls slowly: without a cooldown, which `left` brings, the last updates still move the
    weights a lot.
    """
    noam = noam_lambda(model.settings["d_model"], warmup)
    optimizer = torch.optim.Adam(model.parameters(), fused=True, **ADAM)
    return optimizer, LambdaLR(optimizer, lambda step: factor * noam(step) * left(step))


# ------------------------------------------------------------------------------------------- best, patience


def merit(row: dict) -> tuple[float, float]:
    """How good an epoch was: measured BLEU beats none, higher beats lower, then the lower validation loss."""
    return (-1.0 if row["bleu"] is None else row["bleu"], -row["val_loss"])


def best_row(history: list[dict]) -> dict | None:
    """The epoch whose weights best.pt holds: the first of the best."""
    return max(history, key=merit, default=None)


def stale(history: list[dict]) -> int:
    """Epochs since the best one; once BLEU was measured, only those that measured it."""
    best = best_row(history)
    later = history[history.index(best) + 1 :] if best else []
    return sum((row["bleu"] is None) == (best["bleu"] is None) for row in later)


# -------------------------------------------------------------------------------------------------- the run


class Run:
    """All that training works with. Where it stands:

    epoch     whole epochs done; `history` has a dict for each, the numbers of its log line
    position  updates done in the epoch after these; `totals` their loss and tokens, `seconds` their time
    stop      set when Ctrl-C was pressed

    checkpoint: of last.pt, to go on from; None starts afresh. Only rank 0 touches the folder, and keeps other
    processes from it until `hold` is closed. ValueError or CheckpointError where the run cannot start.
    """

    def __init__(self, args: argparse.Namespace, checkpoint: dict | None, hold: contextlib.ExitStack):
        self.args, self.device, self.stop = args, args.device, threading.Event()
        if args.bleu_every or args.bleu_updates:
            need_sacrebleu()
        importlib.import_module("tqdm")  # what is missing shows now, with nothing written
        data = None if args.sample else args.data
        self.lines = {split: load_split(data, split, args.src, args.tgt) for split in ("train", "val")}
        self.text = fingerprint(self.lines)
        self.tokenizer = self.find_tokenizer(checkpoint)

        torch.manual_seed(args.seed)
        self.model = make_model(args, self.tokenizer.vocab_size, self.device)
        self.parallel = parallel(self.model)  # what training calls; its weights are the model's
        if rank():
            torch.manual_seed(args.seed + rank())  # the same weights everywhere, another dropout
        else:
            make_folder(args.out)
            hold.enter_context(held("--out", args.out))
        self.sets = {split: self.dataset(split) for split in self.lines}
        self.sampler = TransformerBatchSampler(
            self.sets["train"].lengths, args.max_tokens, seed=args.seed, rank=rank(), world_size=world_size()
        )
        self.cooldown: tuple[int, int, int] | None = None  # first update, how many, --bleu-updates
        self.optimizer, self.scheduler = make_optimizer(
            self.model, args.warmup, args.lr_factor, lambda step: self.rate_left(step)
        )

        self.epoch, self.position, self.history = 0, 0, []
        self.totals, self.seconds = torch.zeros(2, dtype=torch.float64, device=self.device), 0.0
        if checkpoint:
            self.go_on_from(checkpoint)
        else:
            self.save()  # a folder that cannot be written to shows now, not after the first epoch
        if rank() == 0:
            self.tokenizer.save(args.out / "tokenizer.model")

    def find_tokenizer(self, checkpoint: dict | None) -> Tokenizer:
        """The checkpoint's, or a new one of the training lines. ValueError: the checkpoint's text differs."""
        if checkpoint is None:
            src_lines, tgt_lines = self.lines["train"]
            return Tokenizer.train([*src_lines, *tgt_lines], self.args.vocab_size)
        if checkpoint["text"] != self.text:
            text = "--sample" if self.args.sample else f"--data {self.args.data}"
            raise ValueError(f"{text}: not the text that {self.args.out} was trained on")
        return unpack_tokenizer(checkpoint, self.args.out / "last.pt")

    def dataset(self, split: str) -> LangPairDataset:
        """The ids of a split; rank 0 keeps them in SPLIT.ids. ValueError where no pair is left."""
        inputs = (*self.lines[split], self.tokenizer, self.args.max_length)
        if rank():
            dataset = LangPairDataset(*inputs)
        else:
            dataset = LangPairDataset.cached(self.args.out / f"{split}.ids", *inputs)
        if not len(dataset):
            raise ValueError(f"--max-length {self.args.max_length}: no pair of the {split} split is left")
        return dataset

    def go_on_from(self, checkpoint: dict) -> None:
        """Put everything back where it stood. CheckpointError where it does not fit."""
        own = checkpoint | {"rng": checkpoint["rng"][rank()]}
        restore(own, self.args.out / "last.pt", self.model, self.optimizer, self.scheduler)
        self.epoch, self.history = checkpoint["epoch"], checkpoint["history"]
        self.position, self.seconds = checkpoint["position"], checkpoint["seconds"]
        self.totals += torch.tensor(checkpoint["totals"], dtype=torch.float64, device=self.device)
        self.plan_cooldown()
        # --epochs and --cooldown may have changed since: the next update's rate is this run's.
        lr = self.scheduler.lr_lambdas[0](self.scheduler.last_epoch)
        self.optimizer.param_groups[0]["lr"], self.scheduler._last_lr = lr, [lr]

    def rate_left(self, step: int) -> float:
        """The part of the learning rate that the cooldown leaves to an update, counted from 0.

        The --bleu-updates after it begin anew, at BLEU_RATE, and end at 0 as well.
        """
        if self.cooldown is None:
            return 1.0
        first, count, more = self.cooldown
        left = first + count - step
        if left <= 0 < left + more:
            return BLEU_RATE * (left + more) / more
        return min(1.0, max(0.0, left / max(1, count)))

    @property
    def on_bleu(self) -> bool:
        """Is the epoch to come that of --bleu-updates?"""
        return self.args.bleu_updates > 0 and self.epoch == self.args.epochs - 1

    def plan_cooldown(self) -> None:
        """Before each epoch: once the cooldown begins, find out how many updates it has.

        The number of batches differs from epoch to epoch, but seed and epoch alone decide it.
        """
        end = self.args.epochs - (self.args.bleu_updates > 0)
        first = max(0, end - self.args.cooldown)  # of its epochs, from 0
        if self.cooldown is None and first <= self.epoch < self.args.epochs:
            count = 0
            for epoch in range(first, end):
                self.sampler.set_epoch(epoch)
                count += len(self.sampler)
            begin = self.history[first - 1]["updates"] if first else 0
            self.sampler.set_epoch(end)
            self.cooldown = begin, count, min(self.args.bleu_updates, len(self.sampler))
        self.sampler.set_epoch(self.epoch)

    def forget_average(self) -> None:
        """Remove averaged.pt before the weights move on: a folder stands for its run as it is now."""
        path = self.args.out / "averaged.pt"
        if rank() == 0 and path.exists():
            path.unlink()
            self.log("removed averaged.pt, of the run as it ended before; a new one comes at the end")

    @property
    def updates(self) -> int:
        """Updates made since the run began."""
        return self.scheduler.last_epoch

    def tick(self, mark: float) -> float:
        """Add the time since `mark` to `seconds` -> now, the next mark."""
        now = time.perf_counter()
        self.seconds += now - mark
        return now

    def log(self, text: str) -> None:
        """Print a line, and append it to log.txt; rank 0 only."""
        if rank():
            return
        say(text)
        path = self.args.out / "log.txt"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written ({reason(error)})") from None

    def write_weights(self, name: str, more: dict | None = None) -> None:
        """Write NAME into the run's folder: what every .pt file there holds, and `more`."""
        weights = {
            "settings": self.model.settings,
            "model": self.model.state_dict(),
            "tokenizer": pack_tokenizer(self.tokenizer),
            "run": self.args.run,
            "epoch": self.epoch,
            "history": self.history,
        }
        write_checkpoint(self.args.out / name, weights | (more or {}))

    def check_finite(self) -> None:
        """ValueError, one line, where the loss or the weights are no longer numbers."""
        if not all(bool(values.isfinite().all()) for values in (self.totals, *self.model.parameters())):
            raise ValueError(
                f"--lr-factor {self.args.lr_factor:g}: the loss or the weights became infinite or NaN in "
                f"epoch {self.epoch + 1}; try a lower one, or a --warmup above {self.args.warmup}"
            )

    def save(self) -> None:
        """Write last.pt, with the random state of every process: all must call this, rank 0 writes.

        ValueError, and the file stays what it was, where the weights have become useless.
        """
        self.check_finite()
        state = training_state(self.model, self.optimizer, self.scheduler)
        state |= dict(position=self.position, totals=self.totals.tolist(), seconds=self.seconds)
        state |= dict(rng=from_all(state["rng"]), text=self.text)
        if rank() == 0:
            self.write_weights("last.pt", state)

    def end_epoch(self, row: dict) -> bool:
        """Enter a finished epoch's numbers and write its files -> is it the best so far?"""
        self.epoch, self.position = row["epoch"], 0
        self.totals, self.seconds = torch.zeros_like(self.totals), 0.0
        self.history.append(row)
        best = best_row(self.history) is row
        if rank() == 0:
            self.write_weights(self.epoch_file(self.epoch).name)
            if best:
                self.write_weights("best.pt")
        self.save()
        if rank() == 0:
            for path in set(self.args.out.glob("epoch-*.pt")) - set(self.last_epochs()):
                path.unlink(missing_ok=True)
        return best

    def epoch_file(self, epoch: int) -> Path:
        return self.args.out / f"epoch-{epoch:02d}.pt"

    def last_epochs(self) -> list[Path]:
        """The files that averaged.pt is the mean of."""
        first = max(1, self.epoch - self.args.average + 1)
        return [self.epoch_file(n) for n in range(first, self.epoch + 1)]

    def describe(self) -> None:
        """Print what was decided, before the first update."""
        args, sets = self.args, self.sets.values()
        sizes, dropped = [len(s) for s in sets], sum(s.dropped_long + s.dropped_empty for s in sets)
        parameters = sum(p.numel() for p in self.model.parameters())
        self.log(
            f"device   {device_name(self.device)}; {args.precision} ({args.why}); torch {torch.__version__}"
        )
        self.log(
            f"data     {'built-in sample' if args.sample else args.data}, {args.src} to {args.tgt}: "
            f"{sizes[0]:,} training and {sizes[1]:,} validation pairs, {dropped} dropped; "
            f"{self.tokenizer.vocab_size:,} pieces"
        )
        tied = "separate, but for target and output" if args.tie_output else "separate"
        self.log(
            f"model    {parameters:,} parameters: {args.num_layers}+{args.num_layers} layers, "
            f"d_model {args.d_model}, {args.num_heads} heads, dff {args.dff}, {args.norm}-norm, "
            f"{args.activation}, embeddings {'shared' if args.share_embeddings else tied}"
        )
        self.log(
            f"train    {args.epochs} epochs x about {len(self.sampler):,} updates of at most "
            f"{args.max_tokens:,} tokens, {self.sampler.padding_share():.1%} padding; seed {args.seed}"
            + (f"; {world_size()} processes, a batch each" if world_size() > 1 else "")
            + (f"; going on after {self.updates:,} updates" if self.updates else "")
        )


def make_folder(folder: Path) -> None:
    """The run's folder. ValueError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot be made ({reason(error)})") from None
