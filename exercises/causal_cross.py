"""Question 2: a causal mask on cross-attention too: output position t sees source positions 0 to t only.

Digit t of the answer is digit n-1-t of the string: the first half of the answer lies in the masked part. One
model is trained with the mask; for comparison, the recipe's trained model gets it afterwards.
"""

import copy

from torch import nn

from exercises.common import RECIPE, Exercise, Variant, forced_tokens, strings_of_length
from exercises.pictures import STYLES, prefer
from model import DecoderLayer, Transformer, make_causal_mask
from toolbox.figures import new_figure
from train import MAX_LEN, make_model

STRINGS = 1000


class CausalCrossLayer(DecoderLayer):
    """A decoder layer whose query t does not see the memory after position t; else as `DecoderLayer`."""

    def forward(self, x, memory, self_mask, cross_mask, cache=(None, None)):
        start = 0 if cache[0] is None else cache[0].length  # tokens before these, in decoding step by step
        end, Ls = start + x.size(1), memory.size(1)
        future = make_causal_mask(max(end, Ls), x.device)[:, :, start:end, :Ls]
        return super().forward(x, memory, self_mask, cross_mask | future, cache)


def with_causal_cross(model: Transformer) -> Transformer:
    for layer in model.decoder.layers:
        layer.__class__ = CausalCrossLayer  # the same parts and weights
    return model


CAUSAL = Variant("causal-cross", "causal cross-attention", lambda run: with_causal_cross(make_model(run)))


def by_place(model: nn.Module) -> list[float]:
    """Token accuracy under teacher forcing at each of the 13 places of an answer: 12 digits and <eos>."""
    src, tgt = strings_of_length(MAX_LEN, STRINGS)
    return (forced_tokens(model, src, tgt) == tgt[:, 1:]).float().mean(0).tolist()


def measure(load, run: dict) -> dict:
    recipe = load(RECIPE)
    late = with_causal_cross(copy.deepcopy(recipe))
    models = {"recipe": recipe, "mask in training": load(CAUSAL), "mask after training": late}
    return {name: by_place(model) for name, model in models.items()}


def tables(results: dict, measured: dict) -> list[list[list[str]]]:
    """Token accuracy by place in the answer: lowest and highest of the first half, of the second, <eos>."""
    half, rows = MAX_LEN // 2, []
    for name, values in prefer(measured)[0].items():
        parts = values[:half], values[half:MAX_LEN], values[MAX_LEN:]
        ends = [dict.fromkeys((f"{min(part):.3f}", f"{max(part):.3f}")) for part in parts]
        rows.append([name, *(" to ".join(part) for part in ends)])
    return [[["", f"places 1 to {half}", f"{half + 1} to {MAX_LEN}", "`<eos>`"], *rows]]


def draw(results: dict, measured: dict):
    figure = new_figure(7.0, 3.8)
    axes = figure.subplots()
    curves, recipe = prefer(measured)
    for (name, values), style in zip(curves.items(), STYLES, strict=False):
        axes.plot(range(1, len(values) + 1), values, label=name, **style)
    axes.set_xticks(range(1, MAX_LEN + 2), [*range(1, MAX_LEN + 1), "<eos>"])
    axes.set(xlabel="place in the answer (12 digits)", ylabel="token accuracy, forced", ylim=(0, 1.04))
    axes.axhline(0.1, color="0.6", lw=0.8)
    axes.text(MAX_LEN + 1, 0.115, "a guess", size=8, color="0.4", ha="right")
    axes.set_title(f"Causal mask on cross-attention; {recipe}", size=11)
    axes.legend()
    return figure


EXERCISE = Exercise(
    "Question 2: a causal mask on cross-attention",
    (RECIPE, CAUSAL),
    measure=measure,
    tables=tables,
    draw=draw,
)
