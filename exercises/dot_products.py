"""Question 4: the dot products q·k split into content and position, at both initialisations.

The first encoder layer makes q and k from LN(content + position). LN divides both summands of a token by the
same number, and W_q and W_k are linear: each score is a sum of products, a part of q times a part of k.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from exercises.common import RECIPE, Exercise, device_of, strings_of_length
from exercises.initialisation import DEFAULT
from exercises.pictures import WHAT, prefer
from model import Transformer
from toolbox.figures import new_figure
from train import MAX_LEN, evaluating

STRINGS = 500
SPLIT = ("content·content", "content·position", "position·content", "position·position")  # query·key


def score_parts(model: Transformer, src: Tensor) -> dict[str, Tensor]:
    """src [B, L] without padding -> part -> [B, h, L, L]; together they are layer 1's scores.

    The parts are those of SPLIT, and "bias": all products with LN's or W's bias, zero at the recipe's start.
    """
    embed, layer = model.encoder.embed, model.encoder.layers[0]
    content = embed.emb(src) * embed.scale
    position = embed.pe[: src.size(1)].expand_as(content)
    spread = ((content + position).var(-1, correction=0, keepdim=True) + layer.ln1.eps).sqrt()
    normed = {
        name: layer.ln1.weight * (x - x.mean(-1, keepdim=True)) / spread
        for name, x in (("content", content), ("position", position))
    }

    def projected(linear: torch.nn.Linear) -> dict[str, Tensor]:
        parts = {name: F.linear(x, linear.weight) for name, x in normed.items()}
        parts["bias"] = linear(layer.ln1.bias).expand_as(content)
        return {name: layer.mha._split(x) for name, x in parts.items()}

    q, k = projected(layer.mha.W_q), projected(layer.mha.W_k)
    parts: dict[str, Tensor] = {}
    for a in q:
        for b in k:
            name = "bias" if "bias" in (a, b) else f"{a}·{b}"
            parts[name] = parts.get(name, 0) + q[a] @ k[b].transpose(-2, -1) / math.sqrt(layer.mha.d_k)
    return parts


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def spreads(model: Transformer, src: Tensor) -> dict:
    """Root mean square of each part, less its mean over the keys: softmax ignores that.

    Then what tells a key from its neighbour: the change of the score from key j to j + 1 that comes from the
    position, and the change that comes from the token, which is noise when a position is looked for.
    """
    with evaluating(model):
        parts = score_parts(model, src)
        found = {name: rms(parts[name] - parts[name].mean(-1, keepdim=True)) for name in (*SPLIT, "bias")}
        by_position = parts["content·position"] + parts["position·position"]
        by_content = parts["content·content"] + parts["position·content"]
        found["position step"] = rms(by_position.diff(dim=-1))
        found["content step"] = rms(by_content.diff(dim=-1))
    return found


def measure(load, run: dict) -> dict:
    src, measured = strings_of_length(MAX_LEN, STRINGS)[0], {}
    for variant in EXERCISE.variants:
        models = {"start": variant.model(run), "trained": load(variant)}
        for when, model in models.items():
            measured[f"{variant.label}, {when}"] = spreads(model, src.to(device_of(model)))
    return measured


def tables(results: dict, measured: dict) -> list[list[list[str]]]:
    """The first seed's models. Both recipes start from the same weights."""
    names = [*SPLIT, "position step", "content step"]
    rows = [["start", "trained by", *SPLIT, "step, position", "step, token"]]
    first = {WHAT[recipe]: seeds[0] for recipe, seeds in measured.items()}
    for variant in EXERCISE.variants:
        models = [("nothing yet", next(iter(first.values()))[f"{variant.label}, start"])]
        models += [(what, found[f"{variant.label}, trained"]) for what, found in first.items()]
        rows += [[variant.label, what, *(f"{found[name]:.3f}" for name in names)] for what, found in models]
    return [rows]


def draw(results: dict, measured: dict):
    figure = new_figure(9.0, 4.0)
    models, recipe = prefer(measured)
    for axes, when in zip(figure.subplots(1, 2), ("start", "trained"), strict=True):
        shown = {name: found for name, found in models.items() if name.endswith(when)}
        for number, (name, found) in enumerate(shown.items()):
            places = [row + 0.4 * number for row in range(len(SPLIT))]
            look = dict(height=0.38, color=("#4c78a8", "#f2cf8e")[number], hatch=("", "//")[number])
            look |= dict(edgecolor="black", label=name.partition(",")[0])
            bars = axes.barh(places, [found[part] for part in SPLIT], **look)
            axes.bar_label(bars, fmt=" %.2f", size=8)
        axes.set_yticks([row + 0.2 for row in range(len(SPLIT))], SPLIT)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("spread over the keys (root mean square)")
        axes.set_title("at the start" if when == "start" else "after training", size=10)
        axes.legend()
    figure.suptitle(f"Scores of the first encoder layer, query·key, by their parts; {recipe}", size=11)
    return figure


EXERCISE = Exercise(
    "Question 4: content and position in q·k",
    (RECIPE, DEFAULT),
    measure=measure,
    tables=tables,
    draw=draw,
    summary=False,
)
