"""Fill a page's template: one HTML file that holds a trained model and runs it in the reader's browser.

`viz.py --html` calls it. The weights are rounded to fp16, and everything that the page says of the model is
measured here, on the rounded weights.
"""

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch

import train
from model import Transformer
from page.faults import FAULTS, exact_share, forced_share, heads_of, next_token_weights, with_faults
from page.unmasked import UNMASKED
from toolbox.checkpoint import CheckpointError, read_checkpoint, rebuild
from toolbox.command_line import show_progress
from train import PLAIN, check_variant, drop_seen, make_dataset, make_model

HERE = Path(__file__).resolve().parent
SCORED, SCORED_HEADS = 2000, 500  # unseen strings for each fault, and for each head switched off
FILES = ("style.css", "model.js", "maps.js", "page.js", "sentence.js")


def load_run(path: Path | str, variant: str, script: str) -> tuple[Transformer, dict]:
    """A trained model and its run. CheckpointError for a file that holds no such variant, or untrained."""
    checkpoint = read_checkpoint(path, ("settings", "model", "run", "epoch"), script)
    check_variant(checkpoint, path, variant)
    model, run = rebuild(Transformer, checkpoint, path), checkpoint["run"]
    if not checkpoint["epoch"]:
        raise CheckpointError(f"{path}: holds an untrained model; let {script} finish an epoch")
    options = ("recipe", "seed", "samples", "extra_long", "dropout")
    if any(name not in run for name in options) or make_model(run).settings != model.settings:
        raise CheckpointError(f"{path}: not the model of train.py; page/model.js has no other")
    return model, run | dict(epochs=checkpoint["epoch"])


def round_weights(model: Transformer) -> None:
    """Give every parameter the value that it will have in the page, that of the nearest fp16 number."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()


def encode_weights(model: Transformer) -> tuple[dict[str, list[int]], str]:
    """-> name -> shape of every parameter; all of them in that order, fp16, little-endian, as base64."""
    state = {name: tensor.half().numpy().astype("<f2") for name, tensor in model.state_dict().items()}
    shapes = {name: list(array.shape) for name, array in state.items()}
    return shapes, base64.b64encode(b"".join(array.tobytes() for array in state.values())).decode()


def decode_weights(model: Transformer, shapes: dict[str, list[int]], text: str) -> None:
    """What `encode_weights` gave, back into a model. RuntimeError where it does not fit."""
    numbers, state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float16), {}
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    for (name, shape), part in zip(shapes.items(), numbers.split(sizes), strict=True):
        state[name] = part.float().view(shape)
    model.load_state_dict(state)


def describe(model: Transformer, run: dict, unmasked: bool = False) -> dict:
    """What the page has to know of a model besides its weights, and everything that it says of it.

    shares: fault -> exact match on SCORED unseen strings with it, "" for the model as it is. An unmasked
    model: without the mask as trained, "", and with the mask, "causal". heads: the same without each head.
    peek: the decoder's head that looks most at the very token to be written, see `next_token_weights`.
    """
    seen = make_dataset(run["samples"], train.TRAIN_SEED, run["extra_long"])[0]
    number = SCORED if unmasked else train.TEST_SIZE  # without a cache, scoring takes much longer
    src, tgt = (ids[:number] for ids in drop_seen(*make_dataset(2 * train.TEST_SIZE, train.TEST_SEED), seen))
    trained = with_faults(model, ["causal"] if unmasked else [])
    shares, heads = {}, {}
    for name in ["", "causal"] if unmasked else ["", *FAULTS]:
        show_progress(f"measuring {name or 'the model'}")
        faulty = with_faults(model, trained.faults ^ ({name} & set(FAULTS)))
        shares[name] = exact_share(faulty, src[:SCORED], tgt[:SCORED])
    for name in [] if unmasked else heads_of(model):
        show_progress(f"measuring without head {name}")
        heads[name] = exact_share(with_faults(model, off=[name]), src[:SCORED_HEADS], tgt[:SCORED_HEADS])
    show_progress("")
    peeks = next_token_weights(trained, src[:SCORED], tgt[:SCORED])
    layer, head = divmod(int(peeks.argmax()), peeks.size(1))
    return dict(
        settings={name: model.settings[name] for name in ("d_model", "num_heads", "num_layers", "max_len")},
        run={name: run[name] for name in ("recipe", "seed", "epochs")},
        torch=torch.__version__.partition("+")[0],
        parameters=sum(p.numel() for p in model.parameters()),
        strings=len(src),
        exact_match=exact_share(trained, src, tgt),
        scored=len(src[:SCORED]),
        scored_heads=len(src[:SCORED_HEADS]),
        forced=forced_share(trained, src[:SCORED], tgt[:SCORED]),
        shares=shares,
        heads=heads,
        peek=dict(layer=layer + 1, head=head + 1, weight=peeks.max().item()),
    )


def fill(data: dict, weights: Sequence[str] = (), template: str = "template.html") -> str:
    """A page: the template with style, scripts, data and weights in the places of their names."""
    parts = {file.partition(".")[0]: (HERE / file).read_text(encoding="utf-8") for file in FILES}
    parts["data"] = json.dumps(data, ensure_ascii=False).replace(
        "<", "\\u003c"
    )  # nothing may end the script element
    parts["weights"] = "\n".join(
        f'<script type="text/plain" class="weights">{text}</script>' for text in weights
    )
    template = (HERE / template).read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def build(models: list[tuple[Transformer, dict]], digits: str) -> str:
    """The page of one model and its run, or of two: the second trained without a causal mask.

    digits: the string it opens with. The models' weights are rounded.
    """
    described, weights = [], []
    for number, (model, run) in enumerate(models):
        round_weights(model)
        shapes, text = encode_weights(model)
        described.append(describe(model, run, unmasked=number == 1) | dict(shapes=shapes))
        weights.append(text)
    return fill(dict(digits=digits, models=described), weights)


def load_models(checkpoint: Path, unmasked: Path | None) -> list[tuple[Transformer, dict]]:
    """What `build` takes. CheckpointError, beginning with the option, for a file that it cannot use."""
    files = [("--checkpoint", checkpoint, PLAIN, "train.py")]
    if unmasked:
        files.append(("--unmasked", unmasked, UNMASKED, "page.unmasked"))
    models = []
    for option, *file in files:
        try:
            models.append(load_run(*file))
        except CheckpointError as error:
            raise CheckpointError(f"{option} {error}") from None
    return models
