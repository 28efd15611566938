"""Exercise 4: pre-norm and post-norm, at 2 and 6 layers, with the recipe's warm-up and without (warmup 1).

The chapter's recipe warms up for 1,000 updates. Noam's peak is (d_model * warmup)^-0.5, so that warmup 1 also
makes it 32 times as high. The fast recipe warms up for 40, to a peak that does not depend on it.
"""

from functools import partial

from exercises.common import RECIPE, Exercise, Variant, model_with


def variant(layers: int, norm_first: bool, warm: bool) -> Variant:
    kind = "pre" if norm_first else "post"
    return Variant(
        f"layers-{layers}-{kind}" + ("" if warm else "-warmup-1"),
        f"{layers} layers, {kind}" + ("" if warm else ", warmup 1"),
        partial(model_with, num_layers=layers, norm_first=norm_first),
        change=lambda run: {} if warm else dict(warmup=1),
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
