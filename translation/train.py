"""Train the German-English translator, score it by free-running BLEU, keep the best.

Run from the project's folder:

python -m translation.train --sample      the 160 built-in pairs, under a minute, no network
python -m translation.train               Multi30k from ./multi30k, see translation.prepare
python -m translation.train --resume      goes on where the run stopped, in mid-epoch too

A run's folder, runs/PRESET or --out, holds

    last.pt         all that --resume needs: on the CPU it goes on to the bit
    best.pt         weights with the highest validation BLEU (lowest loss, as long as none was measured)
    epoch-NN.pt     weights after each of the last --average epochs; averaged.pt, their mean, at the end
    tokenizer.model the subwords, also inside every checkpoint; log.txt; tensorboard/; train.ids, val.ids

With several GPUs or machines, the same script under torchrun, for instance

torchrun --nproc-per-node 4 -m translation.train

where each process takes a batch of its own of at most --max-tokens; --out must be a folder they all see.
`load_translator` gives other scripts a trained model.
"""

import argparse
import contextlib
import hashlib
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from model import ACTIVATION, ATTENTION, PAD_ID, Transformer
from train import (
    ADAM,
    CHECKPOINT_KEYS,
    ArgumentParser,
    CheckpointError,
    add_device_option,
    choose_device,
    choose_precision,
    device_name,
    evaluating,
    integer,
    load_checkpoint,
    loss_sum,
    noam_lambda,
    random_state,
    rebuild,
    replacing,
    restore,
    run_script,
    say,
)
from translation.data import (
    MAX_LENGTH,
    VOCAB_SIZE,
    LangPairDataset,
    Tokenizer,
    TransformerBatchSampler,
    collate,
)
from translation.decode import translate_lines
from translation.distributed import (
    any_of,
    from_all,
    from_first,
    own_device,
    parallel,
    process_group,
    rank,
    started,
    summed,
    world_size,
)
from translation.prepare import load_split

# The defaults of the options of the same names. Each line: model; learning rate; batches and length of run.
# fmt: off
PRESETS = {
    "small": dict(  # for Multi30k's 29,000 pairs
        d_model=256, num_heads=8, dff=1024, num_layers=3, dropout=0.3, norm="pre",
        warmup=400, lr_factor=0.5, cooldown=12, average=1,  # a cooled last epoch needs no mean
        vocab_size=VOCAB_SIZE, max_tokens=2500, epochs=36, bleu_every=4,
    ),
    "base": dict(  # Vaswani et al. 2017, table 3
        d_model=512, num_heads=8, dff=2048, num_layers=6, dropout=0.1, norm="post",
        warmup=4000, lr_factor=1.0, cooldown=0, average=5,
        vocab_size=VOCAB_SIZE, max_tokens=4096, epochs=20, bleu_every=2,
    ),
    "sample": dict(  # what --sample takes: learns its 128 sentences by heart
        d_model=128, num_heads=4, dff=256, num_layers=1, dropout=0.1, norm="post",
        warmup=100, lr_factor=0.5, cooldown=0, average=5,
        vocab_size=800, max_tokens=512, epochs=40, bleu_every=10,
    ),
}
# fmt: on
MODEL_OPTIONS = ("d_model", "num_heads", "dff", "num_layers", "dropout", "activation", "share_embeddings")
# What may change on --resume:
FREE_OPTIONS = {"epochs", "cooldown", "bleu_every", "patience", "average", "save_every"}
LOG_EVERY = 20  # updates between two points of TensorBoard's curves
SHOWN = 3  # translations printed at the end


class Interrupted(Exception):
    """Ctrl-C was pressed, and training stands between two updates."""


# -------------------------------------------------------------------------------------- training, validation


def make_model(args: argparse.Namespace, vocab_size: int, device: torch.device) -> Transformer:
    """The untrained model of this script's options, on `device`."""
    options = {name: getattr(args, name) for name in MODEL_OPTIONS}
    options |= dict(norm_first=args.norm == "pre", max_len=args.max_length + 2)
    attention = choose_attention(args.attention, device)
    return Transformer(vocab_size, vocab_size, attention=attention, **options).to(device)


def make_optimizer(
    model: Transformer, warmup: int, factor: float, updates: int = 0, cooldown: int = 0
) -> tuple[torch.optim.Adam, LambdaLR]:
    """Adam and `factor` times the Noam schedule. ValueError when warmup < 1.

    With a cooldown the rate also falls in a straight line to 0 over the last so many of the `updates`: Noam's
    own falls so slowly that the last weights are still shaken.
    """
    noam = noam_lambda(model.settings["d_model"], warmup)

    def rate(step: int) -> float:
        left = max(updates - step, 0) / cooldown if cooldown else 1.0
        return factor * noam(step) * min(1.0, left)

    optimizer = torch.optim.Adam(model.parameters(), fused=True, **ADAM)
    return optimizer, LambdaLR(optimizer, rate)


def train_step(
    model, optimizer, scheduler, batch: dict[str, Tensor], precision: str, smoothing: float, clip: float
) -> tuple[Tensor, Tensor]:
    """One update on a batch of `collate` -> float64 [2]: summed smoothed loss and real tokens; gradient norm.

    The loss is the mean over the batch's real tokens, those of all processes together; what comes back
    counts them all too. The norm is taken before clipping to `clip`.
    """
    with torch.autocast(batch["src"].device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(batch["src"], batch["tgt_in"])
    total, tokens = loss_sum(logits, batch["labels"], smoothing), (batch["labels"] != PAD_ID).sum()
    counted = summed(torch.stack([total.detach().double(), tokens.double()]))
    optimizer.zero_grad(set_to_none=True)
    # `backward` takes the mean over the processes: times their number it is the sum. No tokens: 0, not 0 / 0.
    (total * world_size() / counted[1].float().clamp(min=1)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scheduler.step()
    return counted, norm


def load_batch(dataset: LangPairDataset, rows: list[int], device: torch.device) -> dict[str, Tensor]:
    """Rows of the dataset, of `collate`. A GPU still at work on the batch before is not waited for."""
    batch, gpu = collate([dataset[i] for i in rows]), device.type == "cuda"
    return {n: (ids.pin_memory() if gpu else ids).to(device, non_blocking=gpu) for n, ids in batch.items()}


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
            _check(stop)
            batch = load_batch(dataset, rows, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(batch["src"], batch["tgt_in"])
            totals += torch.stack(
                [loss_sum(logits, batch["labels"]).double(), (batch["labels"] != PAD_ID).sum()]
            )
    loss, tokens = totals.tolist()
    return loss / tokens


def greedy_translate(model, tokenizer, lines, stop: threading.Event | None = None) -> list[str]:
    """`translate_lines` without a beam. Interrupted when `stop` is set meanwhile."""
    return translate_lines(model, tokenizer, lines, beam=1, report=lambda done: _check(stop))


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False
) -> tuple[float, str]:
    """sacreBLEU of plain text -> score from 0 to 100, signature. Cased unless `lowercase`.

    ValueError without sacrebleu, or where there is not one hypothesis per reference.
    """
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ValueError(
            "sacrebleu is not installed: pip install -r translation/requirements.txt, or use --bleu-every 0"
        ) from None
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses, {len(references)} references: must be equally many")
    metric = BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return float(score), str(metric.get_signature())


def _check(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Interrupted


@contextlib.contextmanager
def catching_interrupt() -> Iterator[threading.Event]:
    """Within: a first Ctrl-C only sets the event, so that no update is cut in half; a second one raises."""
    stop = threading.Event()

    def handler(*_):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


# -------------------------------------------------------------------------------------------- best, patience


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


# ---------------------------------------------------------------------------------------------- checkpoints


def write_checkpoint(path: Path, checkpoint: dict) -> None:
    """Plain values and tensors, never half written. CheckpointError where it cannot be."""
    try:
        with replacing(path) as file:
            torch.save(checkpoint, file)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be written ({getattr(error, 'strerror', error)})") from None


def read_checkpoint(path: Path | str, more: Sequence[str] = ()) -> dict:
    """A checkpoint of this script, in CPU memory. CheckpointError for none, or one without a key it needs."""
    return load_checkpoint(path, ("settings", "model", "tokenizer", *more), "translation.train")


def load_translator(
    path: Path | str, device: torch.device | str = "cpu"
) -> tuple[Transformer, Tokenizer, dict]:
    """Any .pt file of a run -> model on `device` in eval mode, tokeniser, the checkpoint's dict.

    A run's folder stands for its averaged.pt, or best.pt as long as it trains. checkpoint["run"] holds the
    run's options, the languages "src" and "tgt" among them. CheckpointError, one line that names the file,
    where it cannot be used.
    """
    if Path(path).is_dir():
        averaged = Path(path) / "averaged.pt"
        path = averaged if averaged.is_file() else Path(path) / "best.pt"
    checkpoint = read_checkpoint(path)
    return rebuild(checkpoint, path).to(device), unpack_tokenizer(checkpoint, path), checkpoint


def unpack_tokenizer(checkpoint: dict, path: Path | str) -> Tokenizer:
    """The tokeniser in a checkpoint, there a uint8 tensor [bytes]."""
    return Tokenizer(checkpoint["tokenizer"].numpy().tobytes(), path)


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """State dict of the mean weights of checkpoints, summed in float64. CheckpointError where one is not."""
    total = {}
    for path in paths:
        weights = read_checkpoint(path)["model"]
        for name, value in weights.items():
            total[name] = total.get(name, 0) + value.double()
    return {name: (total[name] / len(paths)).to(value.dtype) for name, value in weights.items()}


# ---------------------------------------------------------------------------------------------- command line


def number(minimum: float, maximum: float = math.inf, open_ends: bool = False) -> Callable[[str], float]:
    """An argparse type: a number from minimum to maximum; with open_ends, neither of them itself."""
    low, high = ("above", "below") if open_ends else ("at least", "at most")
    legal = f"a number {low} {minimum:g}" + ("" if maximum == math.inf else f" and {high} {maximum:g}")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = minimum < value < maximum if open_ends else minimum <= value <= maximum
        if not inside or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {legal}")
        return value

    return parse


def choose_attention(name: str, device: torch.device) -> str:
    """--attention -> "manual" or "sdpa"."""
    if name != "auto":
        return name
    return "manual" if device.type == "cpu" else "sdpa"


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="translation.train", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--data", type=Path, default="multi30k", help="folder with train.de, train.en, val.de,"
                      " val.en, plain or .gz")  # fmt: skip
    text.add_argument("--sample", action="store_true", help="the 160 built-in pairs, with --preset sample")
    add("--src", default="de", help="language translated from, the end of its files' names")
    add("--tgt", default="en", help="language translated to")
    add(
        "--preset",
        choices=PRESETS,
        default="small",
        help="sets the defaults of sizes, learning rate, batches, epochs",
    )
    add("--out", type=Path, help="folder of the run; None: runs/PRESET")
    add("--resume", action="store_true", help="go on with the run in --out; its options need not be repeated")
    add("--d-model", type=integer(1), help="width of a token's vector")
    add("--num-heads", type=integer(1), help="attention heads")
    add("--dff", type=integer(1), help="inner width of the feed-forward part")
    add("--num-layers", type=integer(1), help="layers of the encoder, and of the decoder")
    add("--dropout", type=number(0, 0.99), help="share of values set to 0")
    add("--norm", choices=("post", "pre"), help="LayerNorm after or before each sublayer")
    add("--activation", choices=ACTIVATION, default="relu", help="of the feed-forward part")
    add("--share-embeddings", action=argparse.BooleanOptionalAction, default=True,
        help="source, target and output matrix are one")  # fmt: skip
    add("--attention", choices=("auto", *ATTENTION), default="auto", help="same result; sdpa: PyTorch's fused"
        " kernel; auto: that on a GPU, manual on the CPU, where it trains faster")  # fmt: skip
    add("--vocab-size", type=integer(1, 1_000_000), help="subword pieces, at most")
    add("--max-length", type=integer(1), default=MAX_LENGTH, help="drop pairs with more pieces on a side")
    add("--max-tokens", type=integer(1), help="of one side of a batch, padding counted")
    add("--epochs", type=integer(1), help="passes over the training pairs, in all")
    add("--warmup", type=integer(1), help="updates until the learning rate peaks")
    add("--lr-factor", type=number(0, open_ends=True), help="times the Noam learning rate")
    add("--cooldown", type=integer(0), help="last epochs, in which the rate falls in a straight line to 0")
    add("--smoothing", type=number(0, 0.99), default=0.1, help="label smoothing, in training only")
    add("--clip", type=number(0, open_ends=True), default=1.0, help="largest norm of a gradient")
    add("--bleu-every", type=integer(0), help="epochs from one validation BLEU to the next; 0: never")
    add("--patience", type=integer(0), default=0, help="scores in a row without a new best that end the run;"
        " 0: no such end")  # fmt: skip
    add("--average", type=integer(1), help="last epochs whose mean is averaged.pt; 1: the last one itself")
    add("--save-every", type=integer(0), default=200, help="updates between saves in an epoch; 0: at its end")
    add("--seed", type=integer(0, 2**32 - 1), default=0, help="for weights, dropout and batches")
    add_device_option(parser)
    add("--precision", choices=("auto", "bf16", "fp32"), default="auto",
        help="auto: bf16 on a GPU that has it")  # fmt: skip
    parser.set_defaults(**PRESETS["small"])
    return parser


def parse_args(parser: ArgumentParser, argv: list[str] | None) -> tuple[argparse.Namespace, dict | None]:
    """-> options, with args.run what a checkpoint keeps of them, and the checkpoint to go on from or None.

    ValueError for what argparse cannot see.
    """
    args = parser.parse_args(argv)
    if args.sample:
        parser.set_defaults(preset="sample")
        args = parser.parse_args(argv)
    parser.set_defaults(**PRESETS[args.preset])
    args = parser.parse_args(argv)
    args.out = args.out or Path("runs") / args.preset
    checkpoint, out = None, args.out
    if args.resume:
        keys = (*CHECKPOINT_KEYS, "position", "totals", "text")
        if not (out / "last.pt").exists():
            raise ValueError(f"--out {out}: holds no last.pt to go on from; leave out --resume")
        checkpoint = read_checkpoint(out / "last.pt", keys)
        kept, processes = checkpoint["run"], len(checkpoint["rng"])
        if processes != started():
            raise ValueError(
                f"--out {out}: made by {processes} processes, which must go on together (torchrun "
                f"--nproc-per-node, --nnodes); now there are {started()}"
            )
        parser.set_defaults(**kept)
        args = parser.parse_args(argv)
        args.out = out
        for name in kept.keys() - FREE_OPTIONS - (set() if kept["sample"] else {"data"}):
            if str(getattr(args, name)) != str(kept[name]):
                option = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{option} {getattr(args, name)}: {out} was made with {kept[name]}; leave it out"
                )
    elif out.is_dir() and any(out.glob("*.pt")):
        raise ValueError(
            f"--out {out}: holds a run; go on with it by --resume, name another folder, or move it away"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; must be a folder, which may be missing")
    if args.src == args.tgt:
        raise ValueError(f"--src and --tgt are both {args.src}: must differ")
    args.device = own_device(choose_device(args.device))
    args.precision, args.why = choose_precision(args.precision, args.device)
    apart = ("resume", "out", "device", "precision", "why")
    args.run = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in apart}
    return args, checkpoint


# --------------------------------------------------------------------------------------------------- the run


class Run:
    """A training run: text, model and where it stands. `epoch` whole epochs and `position` batches of the
    next one are done. ValueError or CheckpointError where it cannot start."""

    def __init__(self, args: argparse.Namespace, checkpoint: dict | None):
        self.args, self.device = args, args.device
        data = None if args.sample else args.data
        train_src, train_tgt = load_split(data, "train", args.src, args.tgt)
        self.val_src, self.val_tgt = load_split(data, "val", args.src, args.tgt)
        self.train_lines = train_src, train_tgt
        lines = (train_src, train_tgt, self.val_src, self.val_tgt)
        self.text = hashlib.sha256(repr(lines).encode("utf-8", "backslashreplace")).hexdigest()
        if checkpoint and checkpoint["text"] != self.text:
            raise ValueError(f"--data {args.data}: not the text that {args.out} was trained on")
        if args.bleu_every:
            corpus_bleu(["a"], ["a"])  # without sacrebleu this ends here, not after the first epochs
        last = args.out / "last.pt"
        self.tokenizer = (
            unpack_tokenizer(checkpoint, last)
            if checkpoint
            else Tokenizer.train([*train_src, *train_tgt], args.vocab_size)
        )
        torch.manual_seed(args.seed)
        self.model = make_model(args, self.tokenizer.vocab_size, self.device)
        self.parallel = parallel(self.model)
        if rank():
            torch.manual_seed(args.seed + rank())  # the same weights everywhere, another dropout
        self.epoch, self.position, self.history = 0, 0, []
        self.totals, self.seconds = torch.zeros(2, dtype=torch.float64, device=self.device), 0.0

        caching = (self.tokenizer, args.max_length)
        if rank():  # only rank 0 touches the folder
            self.train_set = LangPairDataset(train_src, train_tgt, *caching)
            self.val_set = LangPairDataset(self.val_src, self.val_tgt, *caching)
        else:
            try:
                args.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"--out {args.out}: cannot be made ({error.strerror or error})") from None
            for leftover in args.out.glob("*.tmp"):  # of a process that was killed while it wrote
                leftover.unlink(missing_ok=True)
            self.train_set = LangPairDataset.cached(args.out / "train.ids", train_src, train_tgt, *caching)
            self.val_set = LangPairDataset.cached(args.out / "val.ids", self.val_src, self.val_tgt, *caching)
        for split, dataset in (("train", self.train_set), ("val", self.val_set)):
            if not len(dataset):
                raise ValueError(f"--max-length {args.max_length}: no pair of the {split} split is left")
        self.sampler = TransformerBatchSampler(
            self.train_set.lengths, args.max_tokens, seed=args.seed, rank=rank(), world_size=world_size()
        )
        epoch = len(self.sampler)  # other epochs have about as many updates
        self.optimizer, self.scheduler = make_optimizer(
            self.model, args.warmup, args.lr_factor, args.epochs * epoch, args.cooldown * epoch
        )
        if checkpoint:
            checkpoint["rng"] = checkpoint["rng"][rank()]
            try:
                self.epoch, self.history = restore(checkpoint, self.model, self.optimizer, self.scheduler)
            except CheckpointError as error:
                raise CheckpointError(f"{last}: {error}") from None
            self.position, self.seconds = checkpoint["position"], checkpoint["seconds"]
            self.totals += torch.tensor(checkpoint["totals"], dtype=torch.float64, device=self.device)
        else:
            self.save()  # a folder that cannot be written to shows now
        if rank() == 0:
            self.tokenizer.save(args.out / "tokenizer.model")

    @property
    def updates(self) -> int:
        return self.scheduler.last_epoch

    def log(self, text: str) -> None:
        """Print a line, and append it to log.txt; rank 0 only."""
        if rank():
            return
        say(text)
        try:
            with open(self.args.out / "log.txt", "a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            raise CheckpointError(
                f"{self.args.out / 'log.txt'}: cannot be written ({error.strerror or error})"
            ) from None

    def weights(self) -> dict:
        """What best.pt, epoch-NN.pt and averaged.pt hold."""
        model = torch.frombuffer(bytearray(self.tokenizer.model), dtype=torch.uint8)
        return {
            "settings": self.model.settings,
            "model": self.model.state_dict(),
            "tokenizer": model,
            "run": self.args.run,
            "epoch": self.epoch,
            "history": self.history,  # one dict per epoch, the numbers of its log line
        }

    def check_finite(self) -> None:
        """ValueError, one line, where the loss or the weights are no longer numbers."""
        weights_fine = all(bool(p.isfinite().all()) for p in self.model.parameters())
        if not (weights_fine and bool(self.totals.isfinite().all())):
            raise ValueError(
                f"--lr-factor {self.args.lr_factor:g}: training ran into infinity in epoch {self.epoch + 1}; "
                f"try a lower one, or a --warmup above {self.args.warmup}"
            )

    def save(self) -> None:
        """Write last.pt, in rank 0, with all ranks' random state: all must call this.

        ValueError, and the one before stays, where the weights have become useless.
        """
        self.check_finite()
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": from_all(random_state(self.device)),
            "position": self.position,
            "totals": self.totals.tolist(),
            "seconds": self.seconds,
            "text": self.text,
        }
        if rank() == 0:
            write_checkpoint(self.args.out / "last.pt", self.weights() | state)

    def epoch_file(self, epoch: int) -> Path:
        return self.args.out / f"epoch-{epoch:02d}.pt"

    def train_epoch(self, writer, stop: threading.Event) -> None:
        """Train on the rest of this epoch's batches. Interrupted when `stop` is set, after a whole update."""
        from tqdm import tqdm

        args = self.args
        self.model.train()
        self.sampler.set_epoch(self.epoch)
        batches = list(self.sampler)
        label = f"epoch {self.epoch + 1}/{args.epochs}"
        todo = tqdm(batches[self.position :], label, len(batches), initial=self.position, leave=False,
                    disable=rank() > 0 or not sys.stderr.isatty())  # fmt: skip
        mark = time.perf_counter()
        since, since_time = torch.zeros_like(self.totals), mark
        try:
            for rows in todo:
                lr = self.scheduler.get_last_lr()[0]
                batch = load_batch(self.train_set, rows, self.device)
                counted, norm = train_step(
                    self.parallel,
                    self.optimizer,
                    self.scheduler,
                    batch,
                    args.precision,
                    args.smoothing,
                    args.clip,
                )
                self.totals += counted
                since += counted
                self.position += 1
                if self.updates % LOG_EVERY == 0 and writer:
                    loss, tokens = since.tolist()
                    now = time.perf_counter()
                    points = dict(loss=loss / tokens, lr=lr, gradient_norm=norm.item(),
                                  tokens_per_second=tokens / (now - since_time))  # fmt: skip
                    for name, value in points.items():
                        writer.add_scalar(f"train/{name}", value, self.updates)
                    since, since_time = torch.zeros_like(since), now
                if args.save_every and self.updates % args.save_every == 0:
                    self.seconds, mark = self.seconds + time.perf_counter() - mark, time.perf_counter()
                    self.save()
                if (world_size() == 1 or self.updates % LOG_EVERY == 0) and any_of(stop.is_set()):
                    raise Interrupted
        finally:
            todo.close()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds += time.perf_counter() - mark

    def measure(self, stop: threading.Event) -> dict:
        """The numbers of the epoch just trained. Interrupted when `stop` is set meanwhile."""
        args, start = self.args, time.perf_counter()
        loss, tokens = self.totals.tolist()
        row = dict(epoch=self.epoch + 1, updates=self.updates, train_loss=loss / tokens)
        val_loss = validation_loss(
            self.model, self.val_set, args.max_tokens, self.device, args.precision, stop
        )
        row |= dict(val_loss=val_loss, perplexity=math.exp(min(val_loss, 700)), bleu=None)
        if args.bleu_every and row["epoch"] % args.bleu_every == 0:
            row["bleu"] = self.bleu(stop)[0]
        row["lr"] = self.optimizer.param_groups[0]["lr"]
        row["tokens_per_second"] = tokens / self.seconds
        row["seconds"] = self.seconds + time.perf_counter() - start
        return row

    def end_epoch(self, writer, stop: threading.Event) -> None:
        """Validate, write the epoch's files, print its line. Interrupted when `stop` is set before that."""
        args, row = self.args, None
        self.check_finite()
        if rank() == 0:
            with contextlib.suppress(Interrupted):
                row = self.measure(stop)
        row = from_first(row)
        if row is None:
            raise Interrupted

        self.epoch, self.position, self.history = row["epoch"], 0, [*self.history, row]
        self.totals, self.seconds = torch.zeros_like(self.totals), 0.0
        is_best = best_row(self.history) is row
        if rank() == 0:
            write_checkpoint(self.epoch_file(self.epoch), self.weights())
            if is_best:
                write_checkpoint(args.out / "best.pt", self.weights())
        self.save()
        if rank():
            return
        for path in args.out.glob("epoch-*.pt"):
            if path not in self.last_epochs():
                path.unlink(missing_ok=True)
        bleu = "" if row["bleu"] is None else "BLEU {bleu:.2f}  ".format(**row)
        self.log(
            "epoch {epoch:2}  train loss {train_loss:.4f}  val loss {val_loss:.4f}  ppl {perplexity:.2f}  "
            "{bleu_text}lr {lr:.2e}  {tokens_per_second:,.0f} tokens/s  {seconds:.1f} s{mark}".format(
                **row, bleu_text=bleu, mark="  best" if is_best else ""
            )
        )
        if writer:
            for name in ("val_loss", "bleu"):
                if row[name] is not None:
                    writer.add_scalar(f"validation/{name.removeprefix('val_')}", row[name], self.updates)
            if row["bleu"] is not None:
                self.add_attention_map(writer)
            writer.flush()

    def add_attention_map(self, writer) -> None:
        """Where the model looks in the first validation sentence; without matplotlib, nothing."""
        with contextlib.suppress(ImportError):
            from translation.attention import draw_example

            figure = draw_example(self.model, self.tokenizer, self.val_src[self.val_set.kept[0]], beam=1)
            writer.add_figure("validation/attention", figure, self.updates)

    def last_epochs(self) -> list[Path]:
        """The files that averaged.pt is the mean of."""
        first = max(1, self.epoch - self.args.average + 1)
        return [self.epoch_file(n) for n in range(first, self.epoch + 1)]

    def bleu(self, stop: threading.Event | None = None) -> tuple[float, str]:
        """Free-running greedy BLEU of the model on the validation lines, and its signature."""
        hypotheses = greedy_translate(self.model, self.tokenizer, self.val_src, stop)
        return corpus_bleu(hypotheses, self.val_tgt)

    def describe(self) -> None:
        """Print what was decided, before the first update."""
        args, sets = self.args, (self.train_set, self.val_set)
        dropped = sum(s.dropped_long + s.dropped_empty for s in sets)
        parameters = sum(p.numel() for p in self.model.parameters())
        self.log(
            f"device   {device_name(self.device)}; {args.precision} ({args.why}); torch {torch.__version__}"
        )
        self.log(
            f"data     {'built-in sample' if args.sample else args.data}, {args.src} to {args.tgt}: "
            f"{len(sets[0]):,} training and {len(sets[1]):,} validation pairs, {dropped} dropped; "
            f"{self.tokenizer.vocab_size:,} pieces"
        )
        self.log(
            f"model    {parameters:,} parameters: {args.num_layers}+{args.num_layers} layers, "
            f"d_model {args.d_model}, {args.num_heads} heads, dff {args.dff}, {args.norm}-norm, "
            f"{args.activation}, embeddings {'shared' if args.share_embeddings else 'separate'}"
        )
        self.log(
            f"train    {args.epochs} epochs x about {len(self.sampler):,} updates of at most "
            f"{args.max_tokens:,} tokens, {self.sampler.padding_share():.1%} padding; seed {args.seed}"
            + (f"; {world_size()} processes, a batch each" if world_size() > 1 else "")
            + (f"; going on after {self.updates:,} updates" if self.updates else "")
        )

    def finish(self, stop: threading.Event) -> None:
        """Write averaged.pt, score it beside best.pt, show some translations."""
        out, paths = self.args.out, [path for path in self.last_epochs() if path.is_file()]
        if paths:
            self.model.load_state_dict(average(paths))  # through the model: shared matrices stay one
            write_checkpoint(out / "averaged.pt", self.weights())
            self.log(f"averaged {len(paths)} epochs: {', '.join(path.name for path in paths)}")
        chosen, top = "best.pt", -1.0
        if self.args.bleu_every:
            for name in ("best.pt", "averaged.pt"):
                if (out / name).is_file():
                    self.model.load_state_dict(read_checkpoint(out / name)["model"])
                    score, signature = self.bleu(stop)
                    self.log(f"{name}: validation BLEU {score:.2f}, free-running greedy ({signature})")
                    if score > top:
                        chosen, top = name, score
        self.model.load_state_dict(read_checkpoint(out / chosen)["model"])
        for title, src, tgt in (
            ("seen in training", *self.train_lines),
            ("validation", self.val_src, self.val_tgt),
        ):
            say(f"{title}, by {chosen}:")
            outputs = greedy_translate(self.model, self.tokenizer, src[:SHOWN], stop)
            for source, reference, output in zip(src, tgt, outputs, strict=False):
                say(f"  source     {source}\n  reference  {reference}\n  output     {output}")
        say(f"wrote {out}")


def open_tensorboard(run: Run):
    """A writer into the run's folder, later points than the run's cut off; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        run.log("curves   none: pip install tensorboard")
        return None
    return SummaryWriter(run.args.out / "tensorboard", purge_step=run.updates + 1)


def train(args: argparse.Namespace, checkpoint: dict | None) -> int:
    """The whole run -> exit status. ValueError, one line, where it cannot be done."""
    # cuDNN's attention plans anew for each shape of batch, and here nearly every batch has its own.
    torch.backends.cuda.enable_cudnn_sdp(False)
    run = Run(args, checkpoint)
    run.describe()
    writer = open_tensorboard(run) if rank() == 0 else None
    training = True
    with catching_interrupt() as stop:
        try:
            while run.epoch < args.epochs and not (args.patience and stale(run.history) >= args.patience):
                run.train_epoch(writer, stop)
                run.end_epoch(writer, stop)
            if run.epoch < args.epochs:
                run.log(
                    f"stopped after epoch {run.epoch}: no new best in {args.patience} scores (--patience)"
                )
            training = False  # from here on the model holds other weights, and last.pt is as it should be
            try:
                if rank() == 0:
                    run.finish(stop)
            finally:
                from_first(None)  # all leave together
        except Interrupted:
            if training:
                run.save()
            if rank() == 0:
                say(
                    f"interrupted after {run.updates:,} updates: --resume --out {args.out} goes on from there"
                )
            return 130
        finally:
            if writer:
                writer.close()
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    try:
        args, checkpoint = parse_args(parser, argv)
        with process_group(args.device):  # by now every process has seen --out as it was
            return train(args, checkpoint)
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: pip install -r translation/requirements.txt")
    except ValueError as error:
        text = " ".join(str(error).split())
        if int(os.environ.get("RANK", 0)):
            return 2  # rank 0 says the same
        parser.error(re.sub(r"^(\w+)=", lambda m: f"--{m[1].replace('_', '-')} ", text))


if __name__ == "__main__":
    run_script(main)
