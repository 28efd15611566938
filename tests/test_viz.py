"""viz.py: the right weights, at the right place in the picture; and every mistake answered in one line."""

import importlib
import re
import sys
from pathlib import Path

import matplotlib
import matplotlib.image
import numpy as np
import pytest
import torch
from processes import ROOT, STRICT, run_python

import viz
from model import Transformer, attention_weights
from toolbox.command_line import shorten
from toolbox.heatmap import measures, say_grid, smallest_row_maximum
from train import BOS_ID, EOS_ID, NUM_OFFSET, encode_digits, greedy_decode, save_checkpoint

SIZES = dict(d_model=8, num_heads=2, dff=8, num_layers=3, max_len=14, dropout=0.5)
HISTORY = [
    dict(epoch=1, loss=2.0, token_acc=0.25, val_exact_match=0.0, lr=1e-3, seconds=1.0),
    dict(epoch=2, loss=1.0, token_acc=0.75, val_exact_match=0.5, lr=2e-3, seconds=1.0),
    dict(epoch=3, loss=0.5, token_acc=1.0, val_exact_match=0.9, lr=1.5e-3, seconds=1.0),
]


def tiny_model(vocab: int = 13, **sizes) -> Transformer:
    """Random weights, ten times the usual size: no two layers, heads or rows look alike."""
    torch.manual_seed(0)
    model = Transformer(vocab, vocab, **{**SIZES, **sizes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    return model


def save(model: Transformer, path: Path, history: list) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    save_checkpoint(path, model, optimizer, scheduler, history=history, run={})


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, next to the checkpoint of a model that was never trained."""
    save(tiny_model(), tmp_path / "tiny.pt", HISTORY)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def run(*argv: str) -> int:
    return viz.main(["--checkpoint", "../tiny.pt", "--device", "cpu", *argv])


def ids_of(digits: str) -> torch.Tensor:
    return torch.tensor([[int(d) + NUM_OFFSET for d in digits] + [EOS_ID]])


def answer_of(digits: str) -> torch.Tensor:
    return torch.cat([torch.tensor([[BOS_ID]]), ids_of(digits)], dim=1)


@pytest.fixture
def say_instead(monkeypatch):
    """say_instead("815"): from now on the model answers <bos> 8 1 5 <eos>, whatever it is asked."""
    return lambda digits: monkeypatch.setattr(viz, "greedy_decode", lambda *_: answer_of(digits))


@pytest.fixture
def drawn(monkeypatch) -> dict:
    """What main hands to draw_map or draw_grid, which here draw nothing."""
    calls = {}
    for name in ("draw_map", "draw_grid"):
        monkeypatch.setattr(viz, name, lambda *args, name=name: calls.update({name: args}))
    return calls


def png_size(path: Path) -> tuple[int, int]:
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    height, width = matplotlib.image.imread(path).shape[:2]
    return width, height


def printed_matrix(out: str) -> tuple[list[str], list[str], np.ndarray]:
    """The rows' names, the columns' names and the numbers of the matrix that was printed."""
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(" " * 7))
    body = [line.split() for line in lines[first + 1 :] if re.match(r" *\S+ +[01]\.\d\d ", line)]
    return [row[0] for row in body], lines[first].split(), np.array([row[1:] for row in body], dtype=float)


# -------------------------------------------------------------------------------------- weights and measures


def test_rows_are_the_tokens_the_decoder_read():
    model = tiny_model()
    weights, rows, columns, output = viz.attention_maps(model, "730")
    answer = greedy_decode(model, encode_digits("730"), 14)[0]
    assert answer[0] == BOS_ID
    names = ["<bos>"] + ["<eos>" if i == EOS_ID else str(i - NUM_OFFSET) for i in answer[1:].tolist()]
    assert rows == names[:-1] and len(set(rows)) > 1
    assert columns == ["7", "3", "0", "<eos>"]
    assert output == "".join(names[1:]).removesuffix("<eos>")
    assert weights.shape == (3, 2, len(rows), 4)


@pytest.mark.parametrize("kind", ["cross", "encoder", "decoder"])
def test_weights_are_the_model_s(kind, say_instead):
    say_instead("815")
    model = tiny_model().train()
    weights, rows, columns, _ = viz.attention_maps(model, "7309", kind)
    assert all(module.training for module in model.modules())
    expected = torch.cat(attention_weights(model.eval(), ids_of("7309"), answer_of("815")[:, :-1])[kind])
    torch.testing.assert_close(weights, expected)
    source, read = ["7", "3", "0", "9", "<eos>"], ["<bos>", "8", "1", "5"]
    assert rows == (source if kind == "encoder" else read)
    assert columns == (read if kind == "decoder" else source)
    assert weights.shape == (3, 2, len(rows), len(columns))


def test_antidiagonal():
    perfect = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]).float()
    assert viz.antidiagonal(perfect) == 1
    assert viz.antidiagonal(perfect.flip(1)) == 0
    assert viz.antidiagonal(torch.eye(4)) == 0.5  # the middle digit and <eos> only
    weights = torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.1, 0.4], [0.3, 0.1, 0.6]])
    assert viz.antidiagonal(weights) == pytest.approx((0.7 + 0.5 + 0.6) / 3)
    with pytest.raises(ValueError, match="4 x 3"):
        viz.antidiagonal(torch.ones(4, 3))


def test_smallest_row_maximum():
    weights = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.4, 0.5], [0.1, 0.0, 0.9]])
    assert smallest_row_maximum(weights) == (0.5, 1, 2)


# -------------------------------------------------------------------------------------------------- pictures


def test_printed_rows_layers_and_heads_count_from_1(capsys):
    weights = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
    expected = "smallest row maximum 0.60 (row 2, token b, looks at y)"
    assert measures(weights, ["a", "b"], ["x", "y"]) == expected
    say_grid(torch.arange(4.0).view(2, 2, 1, 1), lambda one: f"{one.item():.0f}")
    expected = ["layer 1, head 1: 0", "layer 1, head 2: 1", "layer 2, head 1: 2", "layer 2, head 2: 3"]
    assert capsys.readouterr().out.splitlines() == expected


def test_hot_cells_are_where_they_belong(tmp_path):
    """Pixels of a map of 3 rows and 4 columns with one hot cell, against the same map without it."""

    def pixels(row=None, column=None):
        weights = torch.zeros(3, 4)
        if row is not None:
            weights[row, column] = 1
        viz.draw_map(weights, list("abc"), list("wxyz"), "title", tmp_path / "map.png")
        return matplotlib.image.imread(tmp_path / "map.png")[..., :3]

    def box(row, column):
        """Left, top, width, height of what differs; y grows downwards."""
        hot = pixels(row, column)
        y, x = np.nonzero((hot != cold).any(2))
        left, top, right, bottom = x.min(), y.min(), x.max() + 1, y.max() + 1
        inside = hot[top + 5, left + 5]  # near the corner: no digits there
        np.testing.assert_allclose(inside, matplotlib.colormaps["Blues"](1.0)[:3], atol=0.01)
        return np.array([left, top, right - left, bottom - top])

    cold = pixels()
    first = box(0, 0)
    _, _, width, height = first
    assert width > 150 and height > 150  # at 200 dots an inch; the two also differ, so a swap would show
    for row, column in [(0, 3), (2, 0), (1, 2)]:
        step = box(row, column) - first
        np.testing.assert_allclose(step, [column * width, row * height, 0, 0], atol=4)


def test_map_has_names_numbers_and_a_fixed_scale(tmp_path):
    weights = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.3, 0.7]])
    figure = viz.draw_map(weights, ["<bos>", "8"], ["7", "8", "<eos>"], "A title", tmp_path / "map.png")
    axes, bar = figure.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["<bos>", "8"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["7", "8", "<eos>"]
    assert (axes.get_ylabel(), axes.get_xlabel()) == (
        "decoder input (predicts the next token)",
        "source token",
    )
    assert figure.get_suptitle() == "A title" and bar.get_ylabel() == "attention weight"
    assert axes.images[0].get_clim() == (0, 1)
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written[(1, 0)] == "0.50" and written[(2, 1)] == "0.70" and len(written) == 6
    width, height = png_size(tmp_path / "map.png")
    assert 1200 <= width <= 1500 and 1000 <= height <= 1500


def test_large_map_has_no_numbers(tmp_path):
    names = ["7"] * 20
    figure = viz.draw_map(torch.full((20, 20), 0.05), names, names, "", tmp_path / "map.png", "encoder")
    assert not figure.axes[0].texts
    assert figure.axes[0].get_ylabel() == "source token (the one that looks)"


def test_grid_has_a_panel_for_every_layer_and_head(tmp_path):
    weights = torch.rand(3, 2, 4, 5)
    figure = viz.draw_grid(weights, list("abcd"), list("vwxyz"), "A title", tmp_path / "grid.png")
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert len(panels) == 6 and figure.get_suptitle() == "A title"
    places = {}
    for axes in panels:
        layer, head = map(int, re.fullmatch(r"layer (\d), head (\d)", axes.get_title()).groups())
        np.testing.assert_array_equal(axes.images[0].get_array(), weights[layer - 1, head - 1])
        assert axes.images[0].get_clim() == (0, 1)
        places[layer, head] = axes.get_position()
    assert places[1, 1].y0 > places[2, 1].y0 > places[3, 1].y0 and places[1, 1].x0 < places[1, 2].x0
    assert [t.get_text() for t in panels[-1].get_xticklabels()] == list("vwxyz")
    assert [t.get_text() for t in panels[0].get_yticklabels()] == list("abcd")
    assert min(png_size(tmp_path / "grid.png")) > 600


@pytest.mark.parametrize("epochs", [1, 3])
def test_curve_shows_the_history(tmp_path, epochs):
    figure = viz.draw_curve(HISTORY[:epochs], tmp_path / "curve.png")
    shown = {line.get_label(): line.get_xydata().tolist() for axes in figure.axes for line in axes.lines}
    assert shown.keys() == {"loss", "token_acc", "val_exact_match", "lr"}
    for name, points in shown.items():
        assert points == [[row["epoch"], row[name]] for row in HISTORY[:epochs]]
    ticks = [t for t in figure.axes[-1].get_xticks() if 0.5 < t < epochs + 0.5]
    assert ticks == list(range(1, epochs + 1))
    assert min(png_size(tmp_path / "curve.png")) > 600


# ------------------------------------------------------------------------------------------------- the script


def test_prints_the_matrix_and_writes_the_picture(folder, capsys, say_instead):
    say_instead("8159037")
    assert run() == 0
    out = capsys.readouterr().out
    rows, columns, matrix = printed_matrix(out)
    assert rows == ["<bos>", "8", "1", "5", "9", "0", "3", "7"]
    assert columns == ["7", "3", "0", "9", "5", "1", "8", "<eos>"]
    np.testing.assert_allclose(matrix.sum(1), 1, atol=0.04)  # eight numbers, each rounded by up to 0.005
    expected = viz.attention_maps(tiny_model(), "7309518")[0][-1].mean(0)
    np.testing.assert_allclose(matrix, expected, atol=0.0051)
    assert "input   7 3 0 9 5 1 8\noutput  8 1 5 9 0 3 7\n" in out and "wrong" not in out
    mean, smallest, row = re.search(r"mean weight (\S+); smallest row maximum (\S+) \(row (\d)", out).groups()
    assert float(mean) == pytest.approx(viz.antidiagonal(expected), abs=0.0051)
    assert float(smallest) == pytest.approx(matrix.max(1).min())
    assert matrix[int(row) - 1].max() == matrix.max(1).min()
    assert [path.name for path in folder.iterdir()] == ["cross_attn.png"]
    assert png_size(folder / "cross_attn.png")[0] > 600


def test_untrained_model_is_no_crash(folder, capsys):
    assert run("--grid", "--digits", "730", "--curve") == 0
    out = capsys.readouterr().out
    assert "wrong   expected 0 3 7; the length differs" in out and "mean weight" not in out
    assert out.count("smallest row maximum") == 3 * 2
    assert {path.name for path in folder.iterdir()} == {"cross_attn_grid.png", "training_curve.png"}


@pytest.mark.parametrize(
    "answer, line, defined",
    [
        ("037", None, True),
        ("038", "wrong   expected 0 3 7", True),
        ("03", "wrong   expected 0 3 7; the length differs, so that the anti-diagonal is not defined", False),
        ("", "wrong   expected 0 3 7; the length differs, so that the anti-diagonal is not defined", False),
    ],
)
def test_says_when_the_output_is_wrong(folder, capsys, say_instead, drawn, answer, line, defined):
    say_instead(answer)
    assert run("--digits", "730") == 0
    out = capsys.readouterr().out
    assert [text for text in out.splitlines() if text.startswith("wrong")] == ([line] if line else [])
    assert ("anti-diagonal, mean weight" in out) == defined
    assert ("(wrong)" in drawn["draw_map"][3]) == (line is not None)


def test_output_that_never_ends_is_drawn(folder, capsys, monkeypatch):
    zeros = lambda model, src, max_len: torch.tensor([[BOS_ID] + [3] * (max_len - 1)])  # noqa: E731
    monkeypatch.setattr(viz, "greedy_decode", zeros)
    assert run("--digits", "730") == 0
    assert printed_matrix(capsys.readouterr().out)[0] == ["<bos>"] + ["0"] * 12  # the last 0 is never read
    assert (folder / "cross_attn.png").exists()


@pytest.mark.parametrize("kind", ["cross", "encoder", "decoder"])
def test_layer_and_head_choose_the_map(folder, capsys, say_instead, drawn, kind):
    say_instead("815")
    weights, rows, columns, _ = viz.attention_maps(tiny_model(), "730", kind)
    choices = {
        (): (weights[2].mean(0), "layer 3 of 3, mean of 2 heads"),
        ("--layer", "1"): (weights[0].mean(0), "layer 1 of 3, mean of 2 heads"),
        ("--head", "2"): (weights[2, 1], "layer 3 of 3, head 2 of 2"),
        ("--layer", "2", "--head", "1"): (weights[1, 0], "layer 2 of 3, head 1 of 2"),
    }
    for options, (expected, words) in choices.items():
        run("--digits", "730", "--kind", kind, *options)
        drawn_weights, *names, title, path, drawn_kind = drawn["draw_map"]
        torch.testing.assert_close(drawn_weights, expected)
        assert names == [rows, columns] and words in title and drawn_kind == kind
        assert path == Path(f"{kind}_attn.png")
        assert ("anti-diagonal" in capsys.readouterr().out) == (kind == "cross")


def test_title_holds_the_strings_and_fits(folder, drawn, say_instead):
    say_instead("037")
    run("--digits", "730")
    assert drawn["draw_map"][3] == "Cross-attention, layer 3 of 3, mean of 2 heads\n730 → 037"
    assert shorten("7" * 24) == "7" * 24 and shorten("7" * 60) == "7" * 23 + "…"


def test_grid_draws_them_all(folder, drawn):
    run("--grid", "--kind", "decoder", "--digits", "730")
    weights, rows, columns, title, path, kind = drawn["draw_grid"]
    torch.testing.assert_close(weights, viz.attention_maps(tiny_model(), "730", "decoder")[0])
    assert path == Path("decoder_attn_grid.png") and kind == "decoder"
    assert title.startswith("Decoder self-attention, every layer and head")


@pytest.mark.parametrize("text", ["7309", "7 3 0 9", "7,3,0,9", " 7, 3, 0, 9 "])
def test_ways_to_write_the_digits(folder, capsys, drawn, text):
    assert run("--digits", text) == 0
    assert "input   7 3 0 9\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "digits, noted", [("1", True), ("12", True), ("123", False), ("123456789012", False)]
)
def test_untrained_lengths_are_noted(folder, capsys, drawn, digits, noted):
    assert run("--digits", digits) == 0
    assert ("digits: training had 3 to 12" in capsys.readouterr().out) == noted


def test_names_of_the_files_are_taken(folder, capsys):
    assert run("--out", "a.svg", "--curve", "b.PNG", "--digits", "730") == 0
    assert {path.name for path in folder.iterdir()} == {"a.svg", "b.PNG"}
    assert "<svg" in (folder / "a.svg").read_text() and min(png_size(folder / "b.PNG")) > 600
    assert capsys.readouterr().out.endswith("wrote a.svg\nwrote b.PNG\n")


def test_help_shows_every_default(capsys):
    with pytest.raises(SystemExit) as ended:
        viz.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "None" not in out
    for default in ("7 3 0 9 5 1 8", "cross", "last", "mean", "training_curve.png", "reverse_transformer.pt"):
        assert f"{default})" in out


# ---------------------------------------------------------------------------------------------------- errors


def one_error(capsys, folder: Path, *argv: str) -> str:
    """Run with arguments that are wrong: status 2, one line, nothing printed or written -> the line."""
    with pytest.raises(SystemExit) as ended:
        run(*argv)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and not list(folder.iterdir())
    assert err.startswith("viz.py: error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--layer", "4"], ["--layer 4", "1 to 3"]),
        (["--layer", "0"], ["--layer", "'0'", "at least 1"]),
        (["--layer", "first"], ["--layer", "'first'"]),
        (["--head", "3"], ["--head 3", "1 to 2"]),
        (["--head", "-1"], ["--head", "'-1'", "at least 1"]),
        (["--digits", ""], ["--digits ''", "1 to 12"]),
        (["--digits", " , "], ["--digits ' , '", "1 to 12"]),
        (["--digits", "73a"], ["--digits '73a'", "0-9"]),
        (["--digits", "7³"], ["--digits '7³'", "0-9"]),
        (["--digits", "1" * 13], ["--digits '1111111111111'", "1 to 12"]),
        (["--kind", "self"], ["--kind", "'self'", "encoder"]),
        (["--out", "no/map.png"], ["--out no/map.png", "folder that exists"]),
        (["--out", "map.docx"], ["--out map.docx", ".png"]),
        (["--out", "map"], ["--out map", ".png"]),
        (["--out", ".."], ["--out ..", ".png"]),
        (["--curve", "no/curve.png"], ["--curve no/curve.png", "folder that exists"]),
        (["--curve", "curve.txt"], ["--curve curve.txt", ".png"]),
        (["--curve", "a.png", "--out", "a.png"], ["--curve a.png", "--out"]),
        (["--grid", "--layer", "1"], ["--grid", "--layer 1"]),
        (["--grid", "--head", "2"], ["--grid", "--head 2"]),
        (["--checkpoint", "none.pt"], ["--checkpoint none.pt", "run train.py first"]),
        (["--checkpoint", __file__], [f"--checkpoint {__file__}", "not a checkpoint"]),
        (["--lair", "1"], ["--lair"]),
    ],
)
def test_mistakes(folder, capsys, argv, parts):
    error = one_error(capsys, folder, *argv)
    assert all(part in error for part in parts), error


def test_mistake_curve_without_epochs(folder, capsys):
    save(tiny_model(), folder.parent / "new.pt", [])
    assert "--curve: ../new.pt" in one_error(capsys, folder, "--curve", "--checkpoint", "../new.pt")


def test_mistake_model_of_another_task(folder, capsys):
    save(tiny_model(vocab=40), folder.parent / "words.pt", HISTORY)
    assert "not a model that reverses" in one_error(capsys, folder, "--checkpoint", "../words.pt")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_mistake_no_cuda(folder, capsys):
    assert "--device cuda" in one_error(capsys, folder, "--device", "cuda")


def test_without_matplotlib(folder, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it now raises ModuleNotFoundError
    for name in ("viz", "toolbox.heatmap", "toolbox.figures"):
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("viz")  # importing does without
    assert "pip install matplotlib" in one_error(capsys, folder)


def test_picture_that_cannot_be_written(folder, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(viz, "draw_map", full)
    assert run() == 2
    error = capsys.readouterr().err
    assert error == "viz.py: error: cross_attn.png: cannot be written (No space left on device)\n"


def test_script_from_another_folder_without_a_display(folder):
    done = run_python(*STRICT, ROOT / "viz.py", "--checkpoint", "../tiny.pt", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("wrote cross_attn.png\n") and (folder / "cross_attn.png").exists()
