"""Exercise 4: pre-norm and post-norm, at 2 and 6 layers, with the recipe's warmup and with none (warmup 1).

The warmup is 1,000 updates in the chapter's recipe, where warmup 1 also makes the rate peak 32 times as high
(Noam's peak is (d_model * warmup)^-0.5), and 40 in the fast one, whose peak stays the same.
"""

from functools import partial

from exercises.common import RECIPE, Exercise, Variant, model_with


def variant(layers: int, norm_first: bool, warm: bool) -> Variant:
    parts = [f"layers-{layers}", "pre" if norm_first else "post", *([] if warm else ["warmup-1"])]
    return Variant(
        "-".join(parts),
        f"{layers} layers, {'pre' if norm_first else 'post'}" + ("" if warm else ", warmup 1"),
        partial(model_with, num_layers=layers, norm_first=norm_first),
        (lambda run: {}) if warm else (lambda run: dict(warmup=1)),
        slower=layers / 2,
    )


EXERCISE = Exercise(
    "Exercise 4: pre-norm and post-norm",
    (
        RECIPE._replace(label="2 layers, pre"),
        variant(2, norm_first=False, warm=True),
        variant(2, norm_first=True, warm=False),
        variant(2, norm_first=False, warm=False),
        variant(6, norm_first=True, warm=True),
        variant(6, norm_first=False, warm=True),
        variant(6, norm_first=True, warm=False),
        variant(6, norm_first=False, warm=False),
    ),
)
