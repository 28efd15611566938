"""The options of translation.train: presets, what the command line sets, what a resumed run keeps."""

import argparse
from pathlib import Path

from model import ACTIVATION, ATTENTION
from toolbox.command_line import ArgumentParser, check_unchanged, integer, number
from toolbox.device import add_device_option, add_precision_option, choose_precision
from toolbox.files import file_name
from translation.checkpoint import read_run
from translation.data import MAX_LENGTH, VOCAB_SIZE, is_cache
from translation.distributed import own_device, started
from translation.prepare import add_language_options, check_languages

# The defaults of the options of the same names. Each line: model; learning rate; batches and length of run.
# fmt: off
PRESETS = {
    "small": dict(  # for Multi30k's 29,000 pairs
        d_model=256, num_heads=8, dff=1024, num_layers=3, dropout=0.3, norm="pre",
        share_embeddings=False, tie_output=True,
        warmup=400, lr_factor=0.5, cooldown=12, average=1,  # a mean gains nothing after a cooldown
        vocab_size=VOCAB_SIZE, max_tokens=2500, epochs=37, bleu_updates=60, bleu_every=4,
    ),
    "base": dict(  # Vaswani et al. 2017, table 3
        d_model=512, num_heads=8, dff=2048, num_layers=6, dropout=0.1, norm="post",
        share_embeddings=True, tie_output=False,
        warmup=4000, lr_factor=1.0, cooldown=0, average=5,
        vocab_size=VOCAB_SIZE, max_tokens=4096, epochs=20, bleu_updates=0, bleu_every=2,
    ),
    "sample": dict(  # what --sample takes: large enough to memorise 128 sentences
        d_model=128, num_heads=4, dff=256, num_layers=1, dropout=0.1, norm="post",
        share_embeddings=True, tie_output=False,
        warmup=100, lr_factor=0.5, cooldown=0, average=5,
        vocab_size=800, max_tokens=512, epochs=40, bleu_updates=0, bleu_every=10,
    ),
}
# fmt: on
NOT_KEPT = {"resume", "out", "device", "precision"}  # belong to one start of the script, not to the run
OWN_FILES = ("tokenizer.model", "log.txt", "train.ids", "val.ids", "tensorboard")  # of a run, beside *.pt
# On --resume:
MAY_CHANGE = {"epochs", "cooldown", "bleu_updates", "bleu_every", "patience", "average", "save_every"}
NEEDED = ("optimizer", "scheduler", "rng", "run", "epoch", "history", "position", "totals", "seconds", "text")


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="translation.train",
        description="Train the German-English translator, score it by free-running BLEU, keep the best.",
    )
    add = parser.add_argument
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--data", type=file_name, default="multi30k", help="folder with train.de, train.en,"
                      " val.de, val.en, plain or .gz")  # fmt: skip
    text.add_argument("--sample", action="store_true", help="the 160 built-in pairs, with --preset sample")
    add_language_options(parser)
    add("--preset", choices=PRESETS, default="small", help="sets the defaults of sizes, learning rate,"
        " batches, epochs")  # fmt: skip
    add("--out", type=file_name, help="folder of the run; None: runs/PRESET")
    add("--resume", action="store_true", help="go on with the run in --out; its options need not be repeated")
    add("--d-model", type=integer(1, 16_384), help="width of a token's vector")
    add("--num-heads", type=integer(1, 16_384), help="attention heads")
    add("--dff", type=integer(1, 65_536), help="inner width of the feed-forward part")
    add("--num-layers", type=integer(1, 100), help="layers of the encoder, and of the decoder")
    add("--dropout", type=number(0, 0.99), help="share of values set to 0")
    add("--norm", choices=("post", "pre"), help="LayerNorm after or before each sublayer")
    add("--activation", choices=ACTIVATION, default="relu", help="of the feed-forward part")
    add("--share-embeddings", action=argparse.BooleanOptionalAction,
        help="source, target and output matrix are one")  # fmt: skip
    add("--tie-output", action=argparse.BooleanOptionalAction,
        help="target and output matrix are one, the source has its own")  # fmt: skip
    add("--attention", choices=("auto", *ATTENTION), default="auto", help="same result; sdpa: PyTorch's fused"
        " kernel; auto: that on a GPU, manual on the CPU, where it trains faster")  # fmt: skip
    add("--vocab-size", type=integer(1, 1_000_000), help="subword pieces, at most")
    add(
        "--max-length",
        type=integer(1, 100_000),
        default=MAX_LENGTH,
        help="drop pairs with more pieces on a side",
    )
    add("--max-tokens", type=integer(1), help="of one side of a batch, padding counted")
    add("--epochs", type=integer(1, 1_000_000), help="passes over the training pairs, in all")
    add("--warmup", type=integer(1), help="updates until the learning rate peaks")
    add("--lr-factor", type=number(0, 1000, open_start=True), help="times the Noam learning rate")
    add("--cooldown", type=integer(0), help="last epochs, in which the rate falls in a straight line to 0")
    add("--bleu-updates", type=integer(0), help="of one last epoch, after the cooldown, which trains on"
        " the BLEU of the model's own translations, too; 0: no such epoch")  # fmt: skip
    add("--smoothing", type=number(0, 0.99), default=0.1, help="label smoothing, in training only")
    add("--clip", type=number(0, 1e9, open_start=True), default=1.0, help="largest norm of a gradient")
    add("--bleu-every", type=integer(0), help="epochs from one validation BLEU to the next; 0: never")
    add("--patience", type=integer(0), default=0, help="scores in a row without a new best that end the run;"
        " 0: no such end")  # fmt: skip
    add(
        "--average",
        type=integer(1, 1000),
        help="last epochs whose mean is averaged.pt; 1: the last one itself",
    )
    add("--save-every", type=integer(0), default=200, help="updates between saves in an epoch; 0: at its end")
    add("--seed", type=integer(0, 2**32 - 1), default=0, help="for weights, dropout and batches")
    add_device_option(parser)
    add_precision_option(parser)
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
    out = args.out = args.out or Path("runs") / args.preset
    checkpoint = None
    if args.resume:
        checkpoint = last_checkpoint(out)
        kept = checkpoint["run"]
        parser.set_defaults(**kept)
        args = parser.parse_args(argv)
        args.out = out
        # Text may move to another --data: its content is compared. The built-in sample reads no --data.
        names = kept.keys() - MAY_CHANGE - (set() if kept["sample"] else {"data"})
        check_unchanged(args, kept, sorted(names), out)
    else:
        check_folder(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; must be a folder, which may be missing")
    if (out / "tensorboard").exists() and not (out / "tensorboard").is_dir():
        raise ValueError(f"--out {out}: holds a file called tensorboard; it must be a folder, or not there")
    check_languages(args)
    args.run = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in NOT_KEPT}
    args.device = own_device(args.device)
    args.precision, args.why = choose_precision(args.precision, args.device)
    return args, checkpoint


def check_folder(out: Path) -> None:
    """ValueError when a new run in the folder would replace what another, or somebody else, left there."""
    if any(out.glob("*.pt")):
        raise ValueError(
            f"--out {out}: holds a run; go on with it by --resume, name another folder, or move it away"
        )
    for name in OWN_FILES:
        path = out / name
        if path.exists() and not (path.suffix == ".ids" and is_cache(path)):  # a run killed early leaves one
            raise ValueError(f"--out {out}: holds {name}, which the run would replace; name another folder")


def last_checkpoint(out: Path) -> dict:
    """What last.pt of the run in `out` holds. ValueError where there is none, or not for these processes."""
    if not (out / "last.pt").exists():
        raise ValueError(f"--out {out}: holds no last.pt to go on from; leave out --resume")
    checkpoint = read_run(out / "last.pt", NEEDED)
    processes = len(checkpoint["rng"])
    if processes != started():
        raise ValueError(
            f"--out {out}: made by {processes} processes, which must go on together (torchrun "
            f"--nproc-per-node, --nnodes); now there are {started()}"
        )
    return checkpoint
