"""Exercise 3: one, two, four and eight heads. The same weights at the start, only split differently."""

from functools import partial

from exercises.common import RECIPE, Exercise, Variant, model_with


def variant(heads: int) -> Variant:
    name = f"{heads} head" + ("s" if heads > 1 else "")
    return Variant(f"heads-{heads}", name, partial(model_with, num_heads=heads))


EXERCISE = Exercise(
    "Exercise 3: the number of heads",
    (variant(1), variant(2), RECIPE._replace(label="4 heads, the recipe"), variant(8)),
)
