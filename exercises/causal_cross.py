"""Question 2: a causal mask on cross-attention too: output position t sees source positions 0 to t only.

Output digit t of a reversal is source digit n-1-t: the first half of the answer lies in the masked part. The
mask is put on for the whole training, and, for comparison, on the trained model of the recipe only.
"""

import copy

from torch import nn

from exercises.common import RECIPE, Exercise, Variant, forced_tokens, strings_of_length
from exercises.pictures import STYLES, prefer
from model import MultiHeadAttention, Transformer, make_causal_mask
from train import MAX_LEN, make_model
from viz import new_figure

STRINGS = 1000


class CausalCrossAttention(MultiHeadAttention):
    """Cross-attention whose query t may not see keys behind position t; else as MultiHeadAttention."""

    def forward(self, query, key, value, mask=None, cache=None):
        cache = {} if cache is None else cache
        start, end = cache.get("queries", 0), cache.get("queries", 0) + query.size(1)
        output = super().forward(query, key, value, mask | self._future(start, end, mask.size(-1)), cache)
        cache["queries"] = end
        return output

    @staticmethod
    def _future(start: int, end: int, keys: int):
        """-> bool [1, 1, end - start, keys], True where the key lies behind the query."""
        return make_causal_mask(max(end, keys))[:, :, start:end, :keys]


def with_causal_cross(model: Transformer) -> Transformer:
    for layer in model.decoder.layers:
        old = layer.cross_mha
        layer.cross_mha = CausalCrossAttention(model.settings["d_model"], old.num_heads, old.drop.p)
        layer.cross_mha.load_state_dict(old.state_dict())
    return model


CAUSAL = Variant("causal-cross", "causal cross-attention", lambda run: with_causal_cross(make_model(run)))


def by_place(model: nn.Module, strings: int) -> list[float]:
    """Token accuracy under teacher forcing at each of the 13 places of an answer of 12 digits and <eos>."""
    src, tgt = strings_of_length(MAX_LEN, strings)
    return (forced_tokens(model, src, tgt) == tgt[:, 1:]).float().mean(0).tolist()


def measure(load, run: dict) -> dict:
    recipe = load(RECIPE)
    late = with_causal_cross(copy.deepcopy(recipe))
    models = {"recipe": recipe, "mask in training": load(CAUSAL), "mask after training": late}
    return {name: by_place(model, STRINGS) for name, model in models.items()}


def table(measured: dict) -> list[list]:
    return [["place in the answer", *range(1, MAX_LEN + 1), "<eos>"]] + [
        [name, *values] for name, values in measured.items()
    ]


def draw(results: dict, measured: dict, path) -> None:
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
    figure.savefig(path, dpi=150)


EXERCISE = Exercise(
    "Question 2: a causal mask on cross-attention",
    (RECIPE, CAUSAL),
    measure=measure,
    table=table,
    draw=draw,
)
