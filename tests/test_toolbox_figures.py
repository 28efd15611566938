"""toolbox/figures.py: size and layout of a picture, and which endings there are."""

from types import SimpleNamespace

import matplotlib.image
import pytest

from toolbox import figures
from toolbox.figures import check_picture, new_figure, save_figure


def test_a_figure_has_its_size_and_makes_room_for_its_labels():
    figure = new_figure(3, 2)
    assert figure.get_size_inches().tolist() == [3, 2]
    assert type(figure.get_layout_engine()).__name__ == "ConstrainedLayoutEngine"


def test_dots_an_inch_and_the_most_that_a_picture_has(tmp_path, monkeypatch):
    def size(path, **dots):
        save_figure(new_figure(4, 2), path, **dots)
        return matplotlib.image.imread(path).shape[:2]

    assert size(tmp_path / "a.png") == (400, 800)
    assert size(tmp_path / "b.PNG", dpi=50) == (100, 200)
    saved = []
    large = SimpleNamespace(
        get_size_inches=lambda: (100, 150), savefig=lambda *_, dpi, **__: saved.append(dpi)
    )
    save_figure(large, tmp_path / "c.png")
    assert 100 * 150 * saved[0] ** 2 == pytest.approx(60e6, rel=1e-9)
    monkeypatch.setattr(figures, "MOST_PIXELS", 5000)  # 25 dots an inch
    assert size(tmp_path / "c.png") == (50, 100)
    save_figure(new_figure(1, 1), None)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_ending_decides_what_is_written(tmp_path):
    save_figure(new_figure(1, 1), tmp_path / "a.SVG")
    assert (tmp_path / "a.SVG").read_bytes().startswith(b"<?xml")


def test_an_ending_that_is_no_picture_is_refused(tmp_path):
    for name in ("a.png", "a.SVG", "a.b.pdf"):
        check_picture("--out", tmp_path / name)
    for name in ("a", "a.txt", "a.png.gz", "png", "a.pgf"):
        with pytest.raises(ValueError, match=r"^--out .*: must end in one of .*\.pdf .*\.png") as error:
            check_picture("--out", tmp_path / name)
        assert "pgf" not in str(error.value).partition(": ")[2]
