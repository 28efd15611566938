"""Exercise 6: SwiGLU in place of GELU: three matrices, two thirds as wide, so equally many parameters."""

import torch.nn.functional as F
from torch import Tensor, nn

from exercises.common import RECIPE, Exercise, Variant
from model import Dropout, Transformer
from train import make_model


class SwiGLU(nn.Module):
    """down(SiLU(gate(x)) * up(x)), then dropout, at every position: [B, L, d_model] -> [B, L, d_model].

    Source: Shazeer 2020 (GLU Variants Improve Transformer).
    """

    def __init__(self, d_model: int, dff: int, dropout: float = 0.1):
        super().__init__()
        inner = dff * 2 // 3
        self.up, self.gate, self.down = (
            nn.Linear(d_model, inner), nn.Linear(d_model, inner), nn.Linear(inner, d_model),
        )  # fmt: skip
        self.drop = Dropout(dropout)
        for linear in (self.up, self.gate, self.down):  # as all other Linear layers of the model
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.silu(self.gate(x)) * self.up(x)))


def swiglu(run: dict) -> Transformer:
    model = make_model(run)
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        layer.ffn = SwiGLU(model.settings["d_model"], model.settings["dff"], run["dropout"])
    return model


EXERCISE = Exercise(
    "Exercise 6: SwiGLU at equal parameters",
    (RECIPE._replace(label="GELU, the recipe"), Variant("swiglu", "SwiGLU", swiglu)),
)
