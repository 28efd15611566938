"""Train the Transformer to reverse strings of digits. Chapter sections 20.9-20.12.

One sample, the string 7 3 0 9 5 (digit d has the id d + 3; PAD=0, BOS=1, EOS=2):

    src     10  6  3 12  8  2  0  0  0  0  0  0  0  0      digits <eos>, then padding
    tgt      1  8 12  3  6 10  2  0  0  0  0  0  0  0      <bos> reversed digits <eos>, then padding
    tgt_in  = tgt[:-1], what the decoder reads;  tgt_out = tgt[1:], what it must say at each position

Run `python train.py`; `python train.py --help` lists the options.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from model import PAD_ID, KVCache, Transformer
from toolbox.checkpoint import (
    CheckpointError,
    read_checkpoint,
    rebuild,
    restore,
    training_state,
    write_checkpoint,
)
from toolbox.command_line import (
    ArgumentParser,
    check_unchanged,
    integer,
    run_script,
    say,
    show_progress,
)
from toolbox.device import (
    add_device_option,
    add_precision_option,
    choose_device,
    choose_precision,
    device_name,
)
from toolbox.files import FileError, check_output, file_name, held

# ------------------------------------------------------------------------------------------------- settings

BOS_ID, EOS_ID = 1, 2
NUM_OFFSET = 3  # digit d is id d + NUM_OFFSET, after PAD, BOS and EOS
VOCAB = 13  # three special tokens and ten digits
MIN_LEN, MAX_LEN = 3, 12  # digits in a string
SEQ_LEN = MAX_LEN + 2  # room for <bos> and <eos>
D_MODEL = 128

CHECKPOINT = "reverse_transformer.pt"
PLAIN = "recipe"  # the model of this file; the exercises train others
TRAIN_SEED, VAL_SEED, TEST_SEED = 0, 1, 2  # of the strings; --seed is for weights, dropout and shuffling
VAL_DRAWN, VAL_SCORED = 1000, 500  # the strings scored after each epoch are the same ones every time
TEST_SIZE = 10_000  # unseen strings for the report at the end
ADAM = dict(lr=1.0, betas=(0.9, 0.98), eps=1e-9)  # lr 1.0 because the schedule gives the whole rate
DEMO = "73095"

# epochs, batch_size, samples and warmup can be set on the command line. peak: the highest learning rate, from
# where it falls in a straight line to 0 just after the last update; None: Noam's schedule, which never ends.
# fmt: off
RECIPES = {
    "chapter": dict(
        epochs=10, batch_size=64, samples=20_000, warmup=1000,
        dropout=0.1, peak=None, smoothing=0.0, extra_long=0,
    ),
    "fast": dict(  # 200 updates; one pass, so little can be memorised
        epochs=1, batch_size=64, samples=12_800, warmup=40,
        dropout=0.0, peak=3e-3, smoothing=0.1, extra_long=2,
    ),
}
# fmt: on


# ------------------------------------------------------------------------------------------------ 20.9 data


def make_dataset(n: int, seed: int, extra_long: int = 0) -> tuple[Tensor, Tensor]:
    """n random strings and their reversals: src and tgt, each [n, SEQ_LEN] int64, laid out as shown above.

    Lengths are uniform over MIN_LEN..MAX_LEN, but the longest is 1 + extra_long times as likely as any other;
    digits are uniform over 0..9. A seed gives the same strings on every machine: the chapter's own, as they
    are drawn from NumPy's generator in the chapter's order, first a length, then that many digits. ValueError
    when n or extra_long is negative.
    """
    if n < 0 or extra_long < 0:
        raise ValueError(f"n={n}, extra_long={extra_long}: must be at least 0")
    rng = np.random.default_rng(seed)
    src, tgt = np.full((2, n, SEQ_LEN), PAD_ID, dtype=np.int64)
    for number, (source, target) in enumerate(zip(src, tgt, strict=True), start=1):
        length = min(rng.integers(MIN_LEN, MAX_LEN + 1 + extra_long), MAX_LEN)
        digits = rng.integers(0, 10, length) + NUM_OFFSET
        source[:length], source[length] = digits, EOS_ID
        target[0], target[1 : length + 1], target[length + 1] = BOS_ID, digits[::-1], EOS_ID
        if number % 100_000 == 0:
            show_progress(f"drew {number:,}/{n:,} strings")
    show_progress("")
    return torch.from_numpy(src), torch.from_numpy(tgt)


def drop_seen(src: Tensor, tgt: Tensor, seen_src: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of (src, tgt) whose source string does not occur in seen_src. Source rows [n, SEQ_LEN]."""
    place_value = VOCAB ** torch.arange(SEQ_LEN)  # a row read as a number in base 13: below 2^52
    unseen = ~torch.isin((src.long() * place_value).sum(1), (seen_src.long() * place_value).sum(1))
    return src[unseen], tgt[unseen]


def encode_digits(digits: str) -> Tensor:
    """ "73095" -> [1, 6] source ids with <eos>, no padding."""
    return torch.tensor([[int(d) + NUM_OFFSET for d in digits] + [EOS_ID]])


def token_name(token_id: int) -> str:
    """3 -> "0", 1 -> "<bos>": how an id is written for a person. ValueError for one that the task lacks."""
    if not 0 <= token_id < VOCAB:
        raise ValueError(f"id {token_id}: must be at least 0 and at most {VOCAB - 1}")
    return ("<pad>", "<bos>", "<eos>", *"0123456789")[token_id]


def decode_digits(ids: Tensor) -> str:
    """[L] ids -> the digits up to the first <eos>, as a string; a <bos> in front does not count."""
    names = [token_name(i) for i in ids.tolist() if i != BOS_ID]
    return "".join(names[: names.index("<eos>")] if "<eos>" in names else names)


# ------------------------------------------------------------------------------------------- 20.10 training


def teacher_forcing(tgt: Tensor) -> tuple[Tensor, Tensor]:
    """tgt [B, L] -> tgt_in [B, L-1], tgt_out [B, L-1]: at each position read one, predict the next."""
    return tgt[:, :-1], tgt[:, 1:]


def noam_lambda(d_model: int, warmup: int) -> Callable[[int], float]:
    """Learning-rate factor for `LambdaLR`: d_model^-0.5 * min(step^-0.5, step * warmup^-1.5).

    LambdaLR counts from 0, the formula from 1, so the peak is at update number `warmup`. ValueError when
    warmup or d_model is below 1. Source: Vaswani et al. 2017, section 5.3.
    """
    if warmup < 1:
        raise ValueError(f"warmup={warmup}: must be at least 1")
    if d_model < 1:
        raise ValueError(f"d_model={d_model}: must be at least 1")
    return lambda step: d_model**-0.5 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)


def linear_decay_lambda(peak: float, warmup: int, total: int) -> Callable[[int], float]:
    """Learning-rate factor for `LambdaLR`: up to `peak` at update number `warmup`, down to 0 after the last.

    ValueError when warmup is not in 1..total.
    """
    if not 1 <= warmup <= total:
        raise ValueError(f"warmup={warmup}: must be at least 1 and at most the {total} updates of the run")
    return lambda step: peak * min((step + 1) / warmup, max(total - step, 0) / (total - warmup + 1))


def make_model(run: dict) -> Transformer:
    """The chapter's model, its initial weights decided by the run's seed."""
    torch.manual_seed(run["seed"])
    return Transformer(VOCAB, VOCAB, d_model=D_MODEL, max_len=SEQ_LEN, dropout=run["dropout"])


def updates_of(run: dict) -> int:
    """How many updates a run makes in all; the last batch of an epoch is dropped when it is too short."""
    return run["epochs"] * (run["samples"] // run["batch_size"])


def make_optimizer(model: torch.nn.Module, run: dict) -> tuple[torch.optim.Adam, LambdaLR]:
    """Adam and the learning-rate schedule for a run; `run`: its options, as in RECIPES."""
    optimizer = torch.optim.Adam(model.parameters(), fused=True, **ADAM)
    if run["peak"] is None:
        return optimizer, LambdaLR(optimizer, noam_lambda(D_MODEL, run["warmup"]))
    return optimizer, LambdaLR(optimizer, linear_decay_lambda(run["peak"], run["warmup"], updates_of(run)))


def loss_sum(logits: Tensor, tgt_out: Tensor, smoothing: float = 0.0) -> Tensor:
    """logits [B, Lt, V] of any dtype, tgt_out [B, Lt] -> summed cross-entropy in nats, fp32; PAD counts 0.

    With label smoothing the right token should get 1 - smoothing and the V - 2 others share the rest; PAD,
    never right, gets none of it. ValueError when the shapes do not go together, transposed ones for instance:
    flattened, they would. Source: Szegedy et al. 2016, section 7; Vaswani et al. 2017, section 5.4.
    """
    if logits.shape[:-1] != tgt_out.shape:
        raise ValueError(f"logits {list(logits.shape)} do not score tgt_out {list(tgt_out.shape)}")
    logits, tgt_out = logits.flatten(0, -2).float(), tgt_out.flatten()
    if not smoothing:
        return F.cross_entropy(logits, tgt_out, ignore_index=PAD_ID, reduction="sum")
    # F.cross_entropy has label_smoothing, but would give PAD a share of it.
    log_p, vocab = F.log_softmax(logits, dim=-1), logits.size(-1)
    nll = F.nll_loss(log_p, tgt_out, ignore_index=PAD_ID, reduction="sum")
    every_token = -((log_p.sum(1) - log_p[:, PAD_ID]) * (tgt_out != PAD_ID)).sum()
    return (1 - smoothing) * nll + smoothing * (every_token - nll) / (vocab - 2)


def train_step(
    model, optimizer, scheduler, src: Tensor, tgt: Tensor, precision: str = "fp32", smoothing: float = 0.0
) -> Tensor:
    """One update on src and tgt [B, L] -> [3]: loss sum, right tokens, tokens; no sync with the host."""
    tgt_in, tgt_out = teacher_forcing(tgt)
    # bf16 has the exponent range of fp32, so no GradScaler is needed. Weights stay fp32.
    with torch.autocast(src.device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(src, tgt_in)
    real = tgt_out != PAD_ID
    tokens, total = real.sum(), loss_sum(logits, tgt_out, smoothing)
    optimizer.zero_grad(set_to_none=True)
    (total / tokens.clamp(min=1)).backward()  # a batch of nothing but padding has loss 0, not 0 / 0
    optimizer.step()
    scheduler.step()
    right = ((logits.detach().argmax(-1) == tgt_out) & real).sum()
    return torch.stack([total.detach(), right, tokens])


def train_epoch(
    model, optimizer, scheduler, src: Tensor, tgt: Tensor, batch_size: int, precision: str,
    smoothing: float = 0.0, label: str = "",
) -> tuple[float, float]:  # fmt: skip
    """One pass over (src, tgt) [n, L] in shuffled batches, a short last one dropped -> loss, token accuracy.

    Both are means over all tokens of the epoch, under teacher forcing, with dropout on. FloatingPointError
    when the loss becomes infinite or NaN: it never recovers. ValueError unless src and tgt have equally many
    rows, at least batch_size of them.
    """
    if not 1 <= batch_size <= len(src) == len(tgt):
        raise ValueError(
            f"{len(src)} sources and {len(tgt)} targets: must be equally many, and not fewer than "
            f"batch_size={batch_size}"
        )
    model.train()
    batches = torch.randperm(len(src)).to(src.device).split(batch_size)[: len(src) // batch_size]
    totals = torch.zeros(3, device=src.device)
    for number, rows in enumerate(batches, start=1):
        totals += train_step(model, optimizer, scheduler, src[rows], tgt[rows], precision, smoothing)
        if number % 20 == 0 or number == len(batches):  # looking more often would make a GPU wait for Python
            show_progress(f"{label}step {number}/{len(batches)}")
            if not totals[0].isfinite():
                raise FloatingPointError(f"{label}step {number}: the loss became infinite or NaN")
    show_progress("")
    loss, right, tokens = totals.tolist()
    return loss / tokens, right / tokens


def train(args: argparse.Namespace, checkpoint: dict | None, history: list[dict]) -> None:
    """The whole run: `history` gets one dict per saved epoch, the numbers of its log line; then the report.

    CheckpointError when the checkpoint does not fit or cannot be written.
    """
    device, run, done = args.device, vars(args), len(history)
    train_set = make_dataset(args.samples, TRAIN_SEED, args.extra_long)
    val_set = drop_seen(*make_dataset(VAL_DRAWN, VAL_SEED), train_set[0])
    src, tgt = (ids.to(device) for ids in train_set)
    val_src, val_tgt = (ids[:VAL_SCORED].to(device) for ids in val_set)
    model = make_model(run).to(device)
    optimizer, scheduler = make_optimizer(model, run)
    if checkpoint:
        restore(checkpoint, args.out, model, optimizer, scheduler)
    describe(args, model, len(val_set[0]), done)
    kept = kept_options(run)
    if not args.out.exists():  # a folder that cannot be written to shows now, not after the first epoch
        save_checkpoint(args.out, model, optimizer, scheduler, history, kept)

    for epoch in range(done + 1, args.epochs + 1):
        start, label = time.perf_counter(), f"epoch {epoch}/{args.epochs}, "
        loss, token_acc = train_epoch(
            model, optimizer, scheduler, src, tgt, args.batch_size, args.precision, args.smoothing, label
        )
        row = dict(epoch=epoch, loss=loss, token_acc=token_acc)
        row["val_exact_match"] = exact_match(model, val_src, val_tgt)
        row["lr"] = scheduler.get_last_lr()[0]  # the next update's, as the chapter prints it
        row["seconds"] = time.perf_counter() - start
        save_checkpoint(args.out, model, optimizer, scheduler, [*history, row], kept)
        history.append(row)  # now that it is true of the file: Ctrl-C may come at any moment
        say(
            "epoch {epoch:2}  loss {loss:.4f}  token_acc {token_acc:.3f}  "
            "val_exact_match {val_exact_match:.3f}  lr {lr:.2e}  {seconds:.1f} s".format(**row)
        )
    say(f"trained in {sum(row['seconds'] for row in history):.1f} s, validation included")
    report(model, train_set[0], device)
    if len(history) > done:
        say(f"wrote {args.out}")


# ------------------------------------------------------------------------------------------ 20.11 inference


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within: eval mode and no gradients. After: every module back in the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def greedy_decode(model: Transformer, src: Tensor, max_len: int = SEQ_LEN, use_cache: bool = True) -> Tensor:
    """Free-running decoding: src [B, Ls] -> ids [B, T], T <= max_len: <bos>, the output, PAD after <eos>.

    The encoder runs once; each step feeds back the likeliest token, until every row has ended. `max_len`
    counts <bos> and <eos>; ValueError unless it is 1 to the model's own max_len, or when Ls = 0.
    use_cache=False computes all positions again at each step, with the same result.
    """
    if not src.size(1):
        raise ValueError("src: has no tokens, not even <eos>")
    longest = model.settings["max_len"]
    if not 1 <= max_len <= longest:
        raise ValueError(f"max_len={max_len}: must be at least 1 and at most the model's max_len={longest}")
    tgt = src.new_full((src.size(0), 1), BOS_ID)
    finished = torch.zeros(src.size(0), dtype=torch.bool, device=src.device)
    cache = KVCache(model.settings["num_layers"]) if use_cache else None
    with evaluating(model):
        memory, src_mask = model.encode(src)
        for _ in range(max_len - 1):
            logits, _ = model.decode(tgt[:, -1:] if use_cache else tgt, memory, src_mask, cache)
            last = logits[:, -1]
            last[:, : BOS_ID + 1] = -torch.inf  # PAD and BOS are never a target
            new = last.argmax(-1).masked_fill(finished, PAD_ID)
            tgt = torch.cat([tgt, new[:, None]], dim=1)
            finished |= new == EOS_ID
            if finished.all():
                break
    return tgt.clone()  # outside of inference mode: a tensor like any other, which training may use


def exact_rows(model: Transformer, src: Tensor, tgt: Tensor, batch_size: int = 500) -> Tensor:
    """src and tgt [n, L] -> bool [n]: does the greedy output equal the target, up to and including <eos>?

    ValueError when they have different numbers of rows.
    """
    if len(src) != len(tgt):
        raise ValueError(f"{len(src)} sources and {len(tgt)} targets: must be equally many")
    parts = []
    for src_part, tgt_part in zip(src.split(batch_size), tgt.split(batch_size), strict=True):
        pred = greedy_decode(model, src_part, max_len=tgt_part.size(1))
        pred = F.pad(pred, (0, tgt_part.size(1) - pred.size(1)), value=PAD_ID)
        parts.append((pred == tgt_part).all(1))  # after <eos> both hold PAD
        show_progress(f"decoded {sum(map(len, parts)):,}/{len(src):,}")
    show_progress("")
    return torch.cat(parts)


def exact_match(model: Transformer, src: Tensor, tgt: Tensor) -> float:
    """Share of rows that `exact_rows` finds right, 0 to 1; NaN where there are none."""
    return exact_rows(model, src, tgt).float().mean().item()


# -------------------------------------------------------------------------------------------- 20.12 results


def describe(args: argparse.Namespace, model: Transformer, unseen: int, epochs_done: int) -> None:
    """Print what was decided, before the first update; `unseen`: validation strings not in training."""
    steps, parameters = args.samples // args.batch_size, sum(p.numel() for p in model.parameters())
    removed, scored = VAL_DRAWN - unseen, min(unseen, VAL_SCORED)
    resumed = f"; going on after epoch {epochs_done}" if epochs_done else ""
    say(f"device   {device_name(args.device)}; {args.precision} ({args.why}); torch {torch.__version__}")
    say(f"model    {parameters:,} parameters")
    say(f"train    {args.samples:,} strings, {args.epochs} epochs x {steps} steps of {args.batch_size}")
    say(f"valid    {VAL_DRAWN:,} drawn, {removed} of them also in training: removed; {scored} scored")
    say(f"seed     {args.seed}; warmup {args.warmup}{resumed}")
    say("columns  loss, token_acc: teacher-forced, training; val_exact_match: free-running, validation")


def report(model: Transformer, train_src: Tensor, device: torch.device) -> None:
    """Print exact match on TEST_SIZE strings that training never had, by length; the chapter's; the demo."""
    src, tgt = drop_seen(*make_dataset(2 * TEST_SIZE, TEST_SEED), train_src)
    src, tgt = src[:TEST_SIZE].to(device), tgt[:TEST_SIZE].to(device)
    right, length = exact_rows(model, src, tgt), (src >= NUM_OFFSET).sum(1)
    lengths = range(MIN_LEN, MAX_LEN + 1)
    groups = [length == n for n in lengths] + [length > 0]
    say(f"exact match on {len(src):,} unseen strings, free-running greedy decoding:")
    say("  length " + "".join(f"{n:>8}" for n in [*lengths, "all"]))
    say("  strings" + "".join(f"{int(g.sum()):>8,}" for g in groups))
    shares = [f"{right[g].float().mean().item():.4f}" if g.any() else "-" for g in groups]
    say("  right  " + "".join(f"{share:>8}" for share in shares))
    src, tgt = (ids[:VAL_SCORED] for ids in make_dataset(VAL_DRAWN, VAL_SEED))  # as the chapter scores
    seen = len(src) - len(drop_seen(src, tgt, train_src)[0])
    share = exact_match(model, src.to(device), tgt.to(device))
    say(f"on the first {len(src)} validation strings, {seen} of them also in training: {share:.3f}")
    answer = decode_digits(greedy_decode(model, encode_digits(DEMO).to(device))[0])
    say(f"demo: {' '.join(DEMO)} -> {' '.join(answer)}")


# ---------------------------------------------------------------------------------------------- checkpoints


def kept_options(run: dict) -> dict:
    """What --resume need not be told again, and must not change."""
    names = {"recipe", "seed", *RECIPES[run["recipe"]]}
    if not run["peak"]:
        names.remove("epochs")  # a rate that falls to 0 must know where it ends; Noam's may go on for longer
    return {name: run[name] for name in sorted(names)}


def save_checkpoint(
    path: Path, model, optimizer, scheduler, history: list[dict], run: dict, variant: str = PLAIN
) -> None:
    """Write all that a later run needs. CheckpointError where it cannot be written.

    variant: which model of exercises/ or page/ this is, as the settings alone may not say it.
    """
    checkpoint = {"settings": model.settings, "epoch": len(history), "history": history, "run": run}
    checkpoint["variant"] = variant
    write_checkpoint(path, checkpoint | training_state(model, optimizer, scheduler))


def load_checkpoint(path: Path | str, variant: str = PLAIN) -> dict:
    """All that `save_checkpoint` wrote. CheckpointError, naming the file, for anything else."""
    keys = ("epoch", "history", "model", "optimizer", "rng", "run", "scheduler", "settings")
    return check_variant(read_checkpoint(path, keys, "train.py"), path, variant)


def check_variant(checkpoint: dict, path: Path | str, variant: str = PLAIN) -> dict:
    """The checkpoint. CheckpointError when it holds another variant: its weights may fit and mean nothing."""
    found = checkpoint.get("variant", PLAIN)
    if found != variant:
        raise CheckpointError(f"{path}: holds the variant {found!r}, not {variant!r}")
    return checkpoint


def load_model(path: Path | str, device: torch.device | str = "cpu") -> tuple[Transformer, list[dict]]:
    """Rebuild a trained model from its file, on `device`, in eval mode -> model, the history of its training.

    Takes what train.py wrote, or the bare state dict that the chapter's own listing saves: a model of the
    chapter's sizes, with no history. CheckpointError, naming the file, for anything else.
    """
    chapters = dict(src_vocab=VOCAB, tgt_vocab=VOCAB)  # all else is Transformer's default
    checkpoint = read_checkpoint(path, ("settings", "model", "history"), "train.py", bare=chapters)
    check_variant(checkpoint, path)
    return rebuild(Transformer, checkpoint, path).to(device), checkpoint["history"]


# --------------------------------------------------------------------------------------------- command line


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="train.py", description=__doc__)
    add = parser.add_argument
    add(
        "--recipe",
        choices=RECIPES,
        default="chapter",
        help="defaults of the next four; also dropout, schedule, smoothing, long strings",
    )
    add("--epochs", type=integer(1, 1_000_000), help="passes over the training strings, in all")
    add("--batch-size", type=integer(1, 10_000_000), help="strings per update")
    add("--samples", type=integer(1, 10_000_000), help="training strings")
    add("--warmup", type=integer(1), help="updates until the learning rate peaks")
    parser.set_defaults(**RECIPES["chapter"])
    add("--seed", type=integer(0, 2**32 - 1), default=0, help="for weights, dropout and shuffling")
    add_device_option(parser)
    add_precision_option(parser)
    add("--out", type=file_name, default=CHECKPOINT, help="checkpoint, written after every epoch")
    add("--resume", action="store_true", help="go on from the checkpoint at --out")
    return parser


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, dict | None]:
    """-> options, and the checkpoint to go on from, or None. Ends the program on anything unusable."""
    parser = build_parser()
    args = parser.parse_args(argv)
    parser.set_defaults(**RECIPES[args.recipe])
    args = parser.parse_args(argv)
    checkpoint = None
    try:
        if args.resume:
            checkpoint = load_checkpoint(args.out)
            parser.set_defaults(**checkpoint["run"])  # what the first run was told need not be typed again
            args = parser.parse_args(argv)
            check_unchanged(args, checkpoint["run"], checkpoint["run"], args.out)
        if args.batch_size > args.samples:
            raise ValueError(f"--batch-size {args.batch_size}: must not exceed --samples {args.samples}")
        if args.peak and args.warmup > updates_of(vars(args)):
            raise ValueError(f"--warmup {args.warmup}: the run has only {updates_of(vars(args))} updates")
        check_output("--out", args.out, "checkpoint")
        args.device = choose_device(args.device)
        args.precision, args.why = choose_precision(args.precision, args.device)
    except ValueError as error:
        parser.error(str(error))
    return args, checkpoint


def main(argv: list[str] | None = None) -> int:
    args, checkpoint = parse_args(argv)
    history, existed = list(checkpoint["history"]) if checkpoint else [], args.out.exists()
    try:
        with held("--out", args.out):
            train(args, checkpoint, history)
    except (CheckpointError, FileError) as error:
        option = "" if isinstance(error, FileError) else "--out "
        print(f"train.py: error: {option}{error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        show_progress("")
        print(f"train.py: error: --warmup {args.warmup}: {error}; try a higher one", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        show_progress("")
        if not args.out.exists():
            say("interrupted before anything was saved")
        elif not history:
            state = "is still what it was" if existed else "holds the untrained model"
            say(f"interrupted before the first epoch ended: {args.out} {state}")
        else:
            say(f"interrupted: {args.out} holds the run up to its last whole epoch; --resume goes on")
        return 130
    return 0


if __name__ == "__main__":
    run_script(main)
