"""Exercise 7: `nn.Transformer` in place of the hand-written stacks, with the same weights at the start."""

import torch
from torch import Tensor

from benchmarks.torch_twin import TorchTransformer, copy_weights, model_pairs
from exercises.common import RECIPE, Exercise, Variant, device_of, free_tokens, make_data, share
from exercises.pictures import WHAT
from model import PAD_ID, Transformer
from train import evaluating, loss_sum, make_model, teacher_forcing


def twin(ours: Transformer) -> TorchTransformer:
    """The same model, weight by weight."""
    theirs = TorchTransformer(ours.settings).to(device_of(ours))
    copy_weights(model_pairs(ours, theirs))
    return theirs


def gradients(model: torch.nn.Module, src: Tensor, tgt: Tensor) -> None:
    """Leave the gradients of the mean loss in the parameters, dropout off."""
    tgt_in, tgt_out = teacher_forcing(tgt)
    model.eval().zero_grad()
    (loss_sum(model(src, tgt_in), tgt_out) / (tgt_out != PAD_ID).sum()).backward()


def measure(load, run: dict) -> dict:
    """How far the twin of the trained model is from it: outputs, gradients, answers."""
    ours = load(RECIPE)
    theirs = twin(ours)
    src, tgt = (ids.to(device_of(ours)) for ids in make_data(RECIPE, run).val)
    tgt_in = teacher_forcing(tgt)[0]
    with evaluating(ours), evaluating(theirs):
        output = (ours(src, tgt_in) - theirs(src, tgt_in))[tgt_in != PAD_ID].abs().max().item()
    gradients(ours, src, tgt)
    gradients(theirs, src, tgt)
    pairs = model_pairs(ours, theirs)
    gradient = max((a.grad - b.grad[rows]).abs().max().item() for a, b, rows in pairs)
    same = share((free_tokens(ours, src, tgt) == free_tokens(theirs, src, tgt)).all(1))
    return dict(output_difference=output, gradient_difference=gradient, same_answers=same)


def tables(results: dict, measured: dict) -> list[list[list[str]]]:
    """The twin of every trained model, seed by seed."""
    rows = [["", "seed", "largest difference of outputs", "of gradients", "share of equal answers"]]
    for recipe, seeds in measured.items():
        for seed, found in enumerate(seeds):
            differences = f"{found['output_difference']:.1e}", f"{found['gradient_difference']:.1e}"
            rows.append([WHAT[recipe], str(seed), *differences, f"{found['same_answers']:.3f}"])
    return [rows]


EXERCISE = Exercise(
    "Exercise 7: nn.Transformer in place of the stacks",
    (
        RECIPE._replace(label="model.py, the recipe"),
        Variant("torch-stacks", "nn.Transformer", lambda run: twin(make_model(run)), slower=1.4),
    ),
    measure=measure,
    tables=tables,
)
