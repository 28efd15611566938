"""Pictures without a display: what every script that draws shares."""

from pathlib import Path
from typing import TYPE_CHECKING

from toolbox.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200
MOST_PIXELS = 60e6  # a picture that would have more gets fewer dots an inch


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, sizes in inches. No pyplot: no display is needed and no global state is left."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("matplotlib is not installed: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path | None, dpi: int = DPI) -> None:
    """Write the picture with so many dots an inch, unless `path` is None."""
    if path is not None:
        width, height = figure.get_size_inches()
        with replacing(path) as file:
            dots = min(dpi, (MOST_PIXELS / (width * height)) ** 0.5)
            figure.savefig(file, format=path.suffix[1:].lower(), dpi=dots)


def check_picture(option: str, path: Path) -> None:
    """ValueError when matplotlib cannot write a picture with the ending of `path`."""
    legal = sorted(new_figure(1, 1).canvas.get_supported_filetypes().keys() - {"pgf"})  # pgf needs LaTeX
    if path.suffix[1:].lower() not in legal:
        raise ValueError(f"{option} {path}: must end in one of .{' .'.join(legal)}")
