"""Question 5: strings longer than in training, with sinusoidal positions and with randomised ones.

With randomised positions a string of n tokens stands at n rows of a larger table, drawn at random and put in
order: training then sees every row that a longer string will need. Source: Ruoss et al. 2023. There input and
output are one sequence; here the answer stands at the rows of its string.
"""

import torch
from torch import Tensor

from exercises.common import (
    LONGEST,
    PER_LENGTH,
    RECIPE,
    ROOM,
    Exercise,
    Variant,
    embeddings,
    forced_tokens,
    free_tokens,
    model_with,
    strings_of_length,
    token_accuracy,
)
from exercises.pictures import WHAT, draw_by_length, exact_by_length
from model import PAD_ID, KVCache, TokenAndPosition, Transformer, sinusoidal_position_encoding
from train import MIN_LEN

RANGE = 32  # rows to draw from; the longest string needs ROOM of them


class RandomisedPositions(TokenAndPosition):
    """ids [B, L] -> [B, L, d_model], each string at rows of its own.

    In each forward pass the source side draws rows for each string, as many as it has tokens and one more;
    the target side takes those drawn last. In eval mode all strings share one draw; longer ones take more.
    """

    source: list[TokenAndPosition]  # the source side; in a list, or it would be a part of the target side

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        source, start = self.source[0], 0 if cache is None else cache.start
        if source is self:
            self.rows = self.draw((ids != PAD_ID).sum(1, keepdim=True) + 1)
        rows = source.rows[:, start : start + ids.size(1)]
        return self.drop(self.emb(ids) * self.scale + self.pe[rows])

    def draw(self, count: Tensor) -> Tensor:
        """count [B, 1] -> rows [B, RANGE]: so many in rising order, then the last row again and again."""
        generator = None if self.training else torch.Generator().manual_seed(0)
        chance = torch.rand(len(count) if self.training else 1, RANGE, generator=generator)  # the CPU's
        order = chance.argsort(dim=1).to(count.device)
        beyond = torch.arange(RANGE, device=count.device) >= count
        return order.masked_fill(beyond, RANGE - 1).sort(dim=1).values


def randomised_positions(run: dict) -> Transformer:
    model = model_with(run, max_len=ROOM)
    for embed in embeddings(model):
        embed.__class__ = RandomisedPositions
        embed.pe = sinusoidal_position_encoding(RANGE, embed.pe.size(1))
        embed.source = [model.encoder.embed]
    return model


def measure(load, run: dict) -> dict:
    """Variant -> length -> accuracy of single tokens, as exact match is soon 0 beyond 12 digits."""
    measured = {}
    for variant in EXERCISE.variants:
        model, found = load(variant), {}
        for length in range(MIN_LEN, LONGEST + 1):
            src, tgt = strings_of_length(length, PER_LENGTH)
            forced, free = forced_tokens(model, src, tgt), free_tokens(model, src, tgt)
            found[str(length)] = dict(forced=token_accuracy(forced, tgt), free=token_accuracy(free, tgt))
        measured[variant.label] = found
    return measured


def tables(results: dict, measured: dict) -> list[list[list[str]]]:
    """By number of digits, mean of the seeds: exact match, and accuracy of single tokens."""
    lengths = ["12", "13", "14", "16", "18", "20", "24"]
    exact, tokens = ([[what, *lengths]] for what in ("exact match; digits", "token accuracy; digits"))

    def means(curves: list[dict]) -> list[str]:
        found = [[curve[n] for curve in curves if n in curve] for n in lengths]
        return [f"{sum(values) / len(values):.3f}" if values else "-" for values in found]

    for label in results:
        for recipe, by_label in exact_by_length(results).items():
            exact.append([f"{label}, {WHAT[recipe]}", *means(by_label.get(label, []))])
        for recipe, seeds in measured.items():
            for how, name in (("free", "free-running"), ("forced", "forced")):
                curves = [{n: row[how] for n, row in one[label].items()} for one in seeds]
                tokens.append([f"{label}, {WHAT[recipe]}, {name}", *means(curves)])
    return [exact, tokens]


def draw(results: dict, measured: dict):
    tokens = {
        recipe: {
            label: [{n: row["free"] for n, row in one[label].items()} for one in seeds] for label in seeds[0]
        }
        for recipe, seeds in measured.items()
    }
    return draw_by_length({"exact match": exact_by_length(results), "token accuracy, free": tokens})


EXERCISE = Exercise(
    "Question 5: longer strings than in training",
    (
        RECIPE._replace(label="sinusoidal"),
        Variant("randomised-positions", "randomised", randomised_positions),
    ),
    measure=measure,
    tables=tables,
    draw=draw,
)
