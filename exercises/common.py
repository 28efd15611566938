"""What the exercises share: what a variant is, how it is trained and scored, and where its result goes.

A variant is the recipe of train.py with one thing changed. All variants see the same strings and start their
training with the same state of the random generator: the one that train.py has at that point.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train
from model import PAD_ID, TokenAndPosition, Transformer, sinusoidal_position_encoding
from toolbox.checkpoint import CheckpointError, restore
from toolbox.files import held, write_text
from train import (
    BOS_ID,
    EOS_ID,
    MAX_LEN,
    MIN_LEN,
    NUM_OFFSET,
    RECIPES,
    drop_seen,
    evaluating,
    exact_rows,
    greedy_decode,
    make_dataset,
    make_model,
    make_optimizer,
    teacher_forcing,
    train_epoch,
)

LONGEST = 24  # digits in the longest string that is ever scored; training stops at 12
ROOM = LONGEST + 2  # rows of a position table for it
PER_LENGTH = 250  # unseen strings of each length
SECONDS = "seconds.csv"


class Variant(NamedTuple):
    """The recipe with one thing changed: the model, the run's options, or the answer to be learnt."""

    name: str  # of its result files
    label: str  # what was changed, for pictures and tables
    model: Callable[[dict], nn.Module] = make_model  # run -> model
    change: Callable[[dict], dict] = lambda run: {}  # run -> the options that differ
    answer: Callable[[Tensor, Tensor], Tensor] = lambda src, tgt: tgt  # src, reversed tgt -> tgt
    published: str = ""  # exact match in the chapter, after 5 epochs and after 10
    slower: float = 1.0  # time of an update, as a multiple of the recipe's


class Exercise(NamedTuple):
    """An exercise or question: variants to train, and what else to measure on the trained models.

    `measure(load, run)` gives a dict for the JSON; load(variant) is the trained model of that run's recipe
    and seed. `tables(results, measured)` gives tables of cells for the README, besides the one of the
    variants, `draw(results, measured)` a figure: results are label -> recipe -> one per seed, measured is
    recipe -> one per seed.
    """

    title: str
    variants: tuple[Variant, ...] = ()
    measure: Callable[..., dict] | None = None
    tables: Callable[[dict, dict], list[list[list[str]]]] | None = None
    draw: Callable | None = None
    summary: bool = True  # whether the variants get a table and a picture of exact match


RECIPE = Variant("recipe", "recipe")


# ----------------------------------------------------------------------------------- models and strings


def model_with(run: dict, **options) -> Transformer:
    """The model of train.py with other arguments for `Transformer`, from the same seed."""
    settings = make_model(run).settings
    torch.manual_seed(run["seed"])
    return Transformer(**settings | options)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def embeddings(model: nn.Module) -> list[TokenAndPosition]:
    """The source side's, then the target side's."""
    return [module for module in model.modules() if isinstance(module, TokenAndPosition)]


def lengthen(model: nn.Module) -> None:
    """Continue the sinusoidal tables up to ROOM rows, for strings longer than in training."""
    for embed in embeddings(model):
        if embed.pe.size(0) < ROOM:
            embed.pe = sinusoidal_position_encoding(ROOM, embed.pe.size(1)).to(embed.pe.device)
    model.settings["max_len"] = max(model.settings["max_len"], ROOM)


def strings_of_length(length: int, count: int) -> tuple[Tensor, Tensor]:
    """`count` random strings of this length -> src [count, length + 1], tgt [count, length + 2]."""
    digits = torch.randint(10, (count, length), generator=torch.Generator().manual_seed(length)) + NUM_OFFSET
    bos, eos = (torch.full((count, 1), token) for token in (BOS_ID, EOS_ID))
    return torch.cat([digits, eos], 1), torch.cat([bos, digits.flip(1), eos], 1)


class Data(NamedTuple):
    """Pairs of src and tgt [n, SEQ_LEN]: to train on, to score after each epoch, to score at the end."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def make_data(variant: Variant, run: dict) -> Data:
    """The strings of train.py, with the answers that this variant is to learn."""
    seen = make_dataset(run["samples"], train.TRAIN_SEED, run["extra_long"])

    def unseen(drawn: int, seed: int, scored: int) -> list[Tensor]:
        return [ids[:scored] for ids in drop_seen(*make_dataset(drawn, seed), seen[0])]

    val = unseen(train.VAL_DRAWN, train.VAL_SEED, train.VAL_SCORED)
    test = unseen(2 * train.TEST_SIZE, train.TEST_SEED, train.TEST_SIZE)
    return Data(*((src, variant.answer(src, tgt)) for src, tgt in (seen, val, test)))


# ----------------------------------------------------------------------------------------------- scoring


def forced_tokens(model: nn.Module, src: Tensor, tgt: Tensor, tgt_in: Tensor | None = None) -> Tensor:
    """Under teacher forcing: src [n, Ls], tgt [n, L] -> ids [n, L-1], the likeliest token at each position.

    The decoder reads `tgt_in` [n, L-1], by default the right prefix. PAD and BOS are never chosen. The ids
    are on src's device, wherever the model is.
    """
    tgt_in = teacher_forcing(tgt)[0] if tgt_in is None else tgt_in
    device, (src, tgt_in) = src.device, (ids.to(device_of(model)) for ids in (src, tgt_in))
    with evaluating(model):
        logits = torch.cat([model(*part) for part in zip(src.split(500), tgt_in.split(500), strict=True)])
    return (logits[..., BOS_ID + 1 :].argmax(-1) + BOS_ID + 1).to(device)


def free_tokens(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    """Free-running: src [n, Ls], tgt [n, L] -> ids [n, L-1], greedy output without <bos>, PAD after <eos>.

    On src's device, wherever the model is.
    """
    length, parts = tgt.size(1), src.to(device_of(model)).split(500)
    outputs = [greedy_decode(model, part, length).to(src.device) for part in parts]
    return torch.cat([F.pad(ids[:, 1:], (0, length - ids.size(1)), value=PAD_ID) for ids in outputs])


def token_accuracy(ids: Tensor, tgt: Tensor) -> float:
    """ids [n, L-1] against tgt [n, L]: the share of right ones, PAD not counted."""
    gold = teacher_forcing(tgt)[1]
    return share((ids == gold)[gold != PAD_ID])


def share(right: Tensor) -> float:
    """bool of any shape -> the share that is True."""
    return right.float().mean().item()


def rows_right(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    """`exact_rows` -> bool [n] on src's device, wherever the model is."""
    return exact_rows(model, src.to(device_of(model)), tgt.to(device_of(model))).to(src.device)


def final_scores(variant: Variant, model: nn.Module, test: tuple[Tensor, Tensor]) -> dict:
    """Exact match on the unseen strings, in all and by length, and on longer strings than in training."""
    right, length = rows_right(model, *test), (test[0] >= NUM_OFFSET).sum(1)
    seen = {n: share(right[length == n]) for n in range(MIN_LEN, MAX_LEN + 1) if (length == n).any()}
    longer = {}
    for n in range(MAX_LEN + 1, LONGEST + 1):
        src, tgt = strings_of_length(n, PER_LENGTH)
        longer[n] = share(rows_right(model, src, variant.answer(src, tgt)))
    return dict(exact_match=share(right), by_length=seen, longer=longer)


# -------------------------------------------------------------------------------------------- result files


def run_of(variant: Variant, recipe: str, seed: int, epochs: int | None = None) -> dict:
    """The options of one training run: the recipe, and what the variant changes."""
    run = RECIPES[recipe] | dict(recipe=recipe, seed=seed)
    if epochs is not None:
        run["epochs"] = epochs
    return run | variant.change(run)


def result_path(folder: Path, name: str, run: dict) -> Path:
    return folder / f"{name}.{run['recipe']}.{run['seed']}.json"


def plain(value):
    """The same without what JSON has no word for: a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, document: dict) -> None:
    write_text(path, json.dumps(plain(document), indent=1) + "\n")


def read_json(path: Path) -> dict:
    """What `write_json` wrote. ValueError, naming the file, for anything else."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no UTF-8
        raise ValueError(f"{path}: not a result file; move it away, or use --again") from None


def note_seconds(folder: Path, stem: str, seconds: float) -> None:
    """Add a line to seconds.csv. Only it has times, so that the JSON files are the same from run to run."""
    line = f"{stem},{seconds:.1f},{torch.get_num_threads()},{torch.__version__}\n"
    with open(folder / SECONDS, "a", encoding="utf-8") as file:
        file.write(line if file.tell() else "result,seconds,threads,torch\n" + line)


def read_seconds(folder: Path) -> dict[str, float]:
    """-> name of a result -> seconds of its latest run."""
    path = folder / SECONDS
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
    return {stem: float(seconds) for stem, seconds, *_ in (line.split(",") for line in lines)}


# ----------------------------------------------------------------------------------------------- training


def train_variant(
    variant: Variant, run: dict, folder: Path, again: bool = False, say: Callable = lambda text: None,
    device: torch.device | str = "cpu",
) -> nn.Module:  # fmt: skip
    """Train, or continue after the last whole epoch, or only load; write the result if there is none.

    -> the trained model on `device`, with room for strings of LONGEST digits. `again`: from the start, and
    write anew. The .pt file beside the result is the checkpoint. CheckpointError when it is of another run;
    FileError when another process is training it.
    """
    path = result_path(folder, variant.name, run)
    with held("--results", path.with_suffix(".pt")):
        return train_held(variant, run, path, again, say, device)


def train_held(
    variant: Variant, run: dict, path: Path, again: bool, say: Callable, device: torch.device | str
) -> nn.Module:
    """`train_variant`, whose result goes to `path`."""
    checkpoint = path.with_suffix(".pt")
    data, history = make_data(variant, run), []
    src, tgt = (ids.to(device) for ids in data.train)
    make_model(run)
    state = torch.get_rng_state()  # as train.py has it when its training starts
    model = variant.model(run).to(device)
    torch.set_rng_state(state)
    optimizer, scheduler = make_optimizer(model, run)
    if checkpoint.exists() and not again:
        saved = train.load_checkpoint(checkpoint, variant.name)
        if saved["run"] != run:
            raise CheckpointError(f"{checkpoint}: of a run with other options; --again starts anew")
        restore(saved, checkpoint, model, optimizer, scheduler)
        history = saved["history"]
    for epoch in range(len(history) + 1, run["epochs"] + 1):
        start, label = time.perf_counter(), f"{path.stem}, epoch {epoch}/{run['epochs']}, "
        loss = token_acc = math.nan  # of a run whose loss is lost; its score is worth knowing all the same
        with contextlib.suppress(FloatingPointError):
            loss, token_acc = train_epoch(
                model, optimizer, scheduler, src, tgt, run["batch_size"], "fp32", run["smoothing"], label
            )
        row = dict(epoch=epoch, loss=loss, token_acc=token_acc)
        row["val_token_acc"] = token_accuracy(forced_tokens(model, *data.val), data.val[1])
        row["val_exact_match"] = share(rows_right(model, *data.val))
        row |= dict(lr=scheduler.get_last_lr()[0], seconds=time.perf_counter() - start)
        history.append(row)
        train.save_checkpoint(checkpoint, model, optimizer, scheduler, history, run, variant.name)
        say("  epoch {epoch:2}  loss {loss:.4f}  val_exact_match {val_exact_match:.3f}".format(**row))
    settings, start = dict(model.settings), time.perf_counter()
    lengthen(model)
    if again or not path.exists():
        document = dict(variant=variant.name, run=run, model=settings)
        document["parameters"] = sum(p.numel() for p in model.parameters())
        document["history"] = [{k: v for k, v in row.items() if k != "seconds"} for row in history]
        write_json(path, document | final_scores(variant, model, data.test))
        seconds = sum(row["seconds"] for row in history) + time.perf_counter() - start
        note_seconds(path.parent, path.stem, seconds)
    return model
