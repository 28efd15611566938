"""Question 5: strings longer than in training, with sinusoidal positions and with randomised ones.

With randomised positions a string of n tokens stands at n rows of a larger table, drawn at random and put in
order: training then sees every row that a longer string will need. Source: Ruoss et al. 2023. There input and
output are one sequence; here the answer stands at its string's own rows.
"""

import torch
from torch import Tensor, nn

from exercises.common import (
    LONGEST,
    PER_LENGTH,
    RECIPE,
    ROOM,
    Exercise,
    Variant,
    forced_tokens,
    free_tokens,
    model_with,
    strings_of_length,
    token_accuracy,
)
from exercises.pictures import draw_by_length, exact_by_length
from model import PAD_ID, TokenAndPosition, Transformer
from train import MIN_LEN

RANGE = 32  # rows to draw from; the longest string needs ROOM of them


class RandomisedPositions(TokenAndPosition):
    """ids [B, L], the first at position `start` -> [B, L, d_model].

    `source` None: this is the source side, and each forward pass draws the rows of each of its strings, as
    many as it has tokens and one more. Else the rows are those that `source` drew last. In eval mode all
    strings share one draw, of which a longer string takes more.
    """

    def __init__(self, vocab_size: int, d_model: int, dropout: float, source: nn.Module | None = None):
        super().__init__(vocab_size, d_model, RANGE, dropout)
        self.sources = [source or self]  # in a list it is no part of this module

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        source = self.sources[0]
        if source is self:
            self.rows = self.draw((ids != PAD_ID).sum(1, keepdim=True) + 1)
        rows = source.rows[:, start : start + ids.size(1)]
        return self.drop(self.embedding(ids) * self.scale + self.position[rows])

    def draw(self, count: Tensor) -> Tensor:
        """count [B, 1] -> rows [B, RANGE]: so many in rising order, then the last row again and again."""
        generator = None if self.training else torch.Generator().manual_seed(0)
        order = torch.rand(len(count) if self.training else 1, RANGE, generator=generator).argsort(dim=1)
        return order.masked_fill(torch.arange(RANGE) >= count, RANGE - 1).sort(dim=1).values


def randomised_positions(run: dict) -> Transformer:
    model, source = model_with(run, max_len=ROOM), None
    for stack in (model.encoder, model.decoder):
        old = stack.embed
        stack.embed = RandomisedPositions(*old.embedding.weight.shape, run["dropout"], source)
        stack.embed.load_state_dict(old.state_dict())
        source = stack.embed
    return model


def measure(load, run: dict) -> dict:
    """Variant -> length -> accuracy of single tokens, which exact match is too strict to see beyond 12."""
    measured = {}
    for variant in EXERCISE.variants:
        model, found = load(variant), {}
        for length in range(MIN_LEN, LONGEST + 1):
            src, tgt = strings_of_length(length, PER_LENGTH)
            forced, free = forced_tokens(model, src, tgt), free_tokens(model, src, tgt)
            found[str(length)] = dict(forced=token_accuracy(forced, tgt), free=token_accuracy(free, tgt))
        measured[variant.label] = found
    return measured


def table(measured: dict) -> list[list]:
    lengths = list(next(iter(measured.values())))
    rows = [["token accuracy; digits", *lengths]]
    for label, found in measured.items():
        rows += [[f"{label}, {how}", *(found[n][how] for n in lengths)] for how in ("forced", "free")]
    return rows


def draw(results: dict, measured: dict, path) -> None:
    tokens = {
        recipe: {
            label: [{n: row["free"] for n, row in one[label].items()} for one in seeds] for label in seeds[0]
        }
        for recipe, seeds in measured.items()
    }
    draw_by_length({"exact match": exact_by_length(results), "token accuracy, free": tokens}, path)


EXERCISE = Exercise(
    "Question 5: longer strings than in training",
    (
        RECIPE._replace(label="sinusoidal"),
        Variant("randomised-positions", "randomised", randomised_positions),
    ),
    measure=measure,
    table=table,
    draw=draw,
)
