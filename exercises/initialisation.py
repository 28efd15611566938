"""Exercise 1: PyTorch's default initialisation, with and without the factor sqrt(d_model); each part alone.

The recipe draws embeddings from N(0, 1 / d_model); its Linear layers are Xavier uniform with zero bias.
PyTorch's defaults are N(0, 1) for embeddings, and uniform up to fan_in^-0.5 for Linear layers, bias included.
"""

from functools import partial

from torch import nn

from exercises.common import RECIPE, Exercise, Variant, embeddings
from model import Transformer
from train import make_model


def started(run: dict, embedding: bool = False, linear: bool = False, scaled: bool = True) -> Transformer:
    """The recipe's model with PyTorch's default start for embeddings, for Linear layers, or for both.

    scaled=False also drops the factor sqrt(d_model) of the embeddings.
    """
    model = make_model(run)
    for module in model.modules():
        if (linear and isinstance(module, nn.Linear)) or (embedding and isinstance(module, nn.Embedding)):
            module.reset_parameters()
    if not scaled:
        for embed in embeddings(model):
            embed.scale = 1.0
    return model


def variant(name: str, label: str, published: str = "", **changed) -> Variant:
    return Variant(name, label, partial(started, **changed), published=published)


DEFAULT = variant("default", "default start", "0.166, 0.604", embedding=True, linear=True)

EXERCISE = Exercise(
    "Exercise 1: the default initialisation",
    (
        RECIPE._replace(published="0.964, 0.996"),
        DEFAULT,
        variant("default-unscaled", "default start, no √d_model", embedding=True, linear=True, scaled=False),
        variant("default-embeddings", "default embeddings", embedding=True),
        variant(
            "default-embeddings-unscaled", "default embeddings, no √d_model", embedding=True, scaled=False
        ),
        variant("default-linear", "default Linear", linear=True),
    ),
)
