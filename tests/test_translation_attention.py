"""translation/attention.py: the right weights under the right pieces; odd characters; TensorBoard's map."""

import contextlib
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib.image
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from processes import ROOT, STRICT, run_python

pytest.importorskip("sentencepiece")

import translation.attention as ta
import translation.train as tt
import viz
from model import Transformer, attention_weights
from toolbox.checkpoint import write_checkpoint
from train import BOS_ID, EOS_ID
from translation.checkpoint import pack_tokenizer
from translation.data import Tokenizer
from translation.decode import Hypothesis, beam_search
from translation.prepare import load_split

ODD = "Für $$ und $x^2 läuft 日本 Öl ß_{"  # pieces of its own; in pairs of $ matplotlib would see formulas
SENTENCE = "Zwei Kinder bauen $$ für 日本"
KINDS = ("cross", "encoder", "decoder")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    german, english = load_split(None, "train")
    return Tokenizer.train([*german, *english, *[ODD] * 20], 600)


def tiny_model(tokenizer, **sizes) -> Transformer:
    """Never trained, weights ten times the usual: no two layers, heads or rows look alike."""
    torch.manual_seed(0)
    options = dict(d_model=16, num_heads=2, dff=16, num_layers=3, max_len=30, dropout=0.5, attention="sdpa")
    model = Transformer(tokenizer.vocab_size, tokenizer.vocab_size, **{**options, **sizes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    return model


def save(model, tokenizer, path: Path) -> None:
    write_checkpoint(
        path,
        {
            "settings": model.settings,
            "model": model.state_dict(),
            "tokenizer": pack_tokenizer(tokenizer),
            "run": dict(src="de", tgt="en"),
        },
    )


@pytest.fixture
def folder(tmp_path, monkeypatch, tokenizer) -> Path:
    """An empty folder to work in, next to the checkpoint of a model that was never trained."""
    save(tiny_model(tokenizer), tokenizer, tmp_path / "tiny.pt")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def drawn(monkeypatch) -> dict:
    """What is handed to draw_map or draw_grid, which here draw nothing."""
    calls = {}
    for name in ("draw_map", "draw_grid"):
        monkeypatch.setattr(ta, name, lambda *args, name=name: calls.update({name: args}))
    return calls


@pytest.fixture
def say_instead(monkeypatch, tokenizer):
    """say_instead("A dog"): from now on the model answers that and <eos>, whatever it is asked."""

    def answer(text):
        ids = [*tokenizer.encode(text), EOS_ID]
        monkeypatch.setattr(ta, "beam_search", lambda *args, **options: [Hypothesis(ids, 0.0)])

    return answer


def run(*argv: str) -> int:
    return ta.main(["--checkpoint", "../tiny.pt", "--device", "cpu", *argv])


def tick_names(axes) -> tuple[list[str], list[str]]:
    return tuple([t.get_text() for t in side] for side in (axes.get_yticklabels(), axes.get_xticklabels()))


def render(figure) -> None:
    FigureCanvasAgg(figure).draw()


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_model_s_and_names_the_pieces(tokenizer, say_instead, kind):
    say_instead("Two children")
    model = tiny_model(tokenizer).train()
    before = torch.get_rng_state()
    weights, rows, columns, output = ta.attention_maps(model, tokenizer, SENTENCE, kind)
    assert all(module.training for module in model.modules()) and torch.equal(torch.get_rng_state(), before)
    ids, said = tokenizer.encode(SENTENCE), tokenizer.encode("Two children")
    src, read = torch.tensor([[BOS_ID, *ids, EOS_ID]]), torch.tensor([[BOS_ID, *said]])
    torch.testing.assert_close(weights, torch.cat(attention_weights(model.eval(), src, read)[kind]))
    source, heard = ["<bos>", *tokenizer.pieces(ids), "<eos>"], ["<bos>", *tokenizer.pieces(said)]
    assert output == [*said, EOS_ID] and "▁Zwei" in source and any("$$" in piece for piece in source)
    assert rows == (source if kind == "encoder" else heard)
    assert columns == (heard if kind == "decoder" else source)
    assert weights.shape == (3, 2, len(rows), len(columns))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert kind != "decoder" or not weights.triu(1).any()


@pytest.mark.parametrize("beam", [1, 4])
def test_output_is_free_running_beam_search(tokenizer, beam, monkeypatch):
    model, used = tiny_model(tokenizer).eval(), []

    def hearing(*args, **options):
        used.append(args[2])
        return beam_search(*args, **options)

    monkeypatch.setattr(ta, "beam_search", hearing)
    _, rows, columns, output = ta.attention_maps(model, tokenizer, "Ein Hund", beam=beam)
    src = torch.tensor([[BOS_ID, *tokenizer.encode("Ein Hund"), EOS_ID]])
    limit = 2 * len(tokenizer.encode("Ein Hund")) + 10
    assert output == beam_search(model, src, beam, max_len=limit)[0].ids and used == [beam]
    assert rows == ["<bos>", *tokenizer.pieces(output[:-1])]


def test_output_that_never_ends_fits_the_model(tokenizer, monkeypatch):
    def endless(model, src, beam, max_len):
        return [Hypothesis([9] * max_len, 0.0)]

    monkeypatch.setattr(ta, "beam_search", endless)
    line = "Zwei Kinder bauen am Strand eine Burg"
    assert 2 * len(tokenizer.encode(line)) + 10 > 30
    _, rows, _, output = ta.attention_maps(tiny_model(tokenizer), tokenizer, line, "decoder")
    assert len(output) == 30 and rows == ["<bos>"] + tokenizer.pieces([9]) * 29


# ------------------------------------------------------------------------------------------------- pictures


def test_legible():
    assert ta.legible("▁Straße läuft $$ <0xE6> é → …") == "▁Straße läuft $$ <0xE6> é → …"
    assert ta.legible("日a🦄\t") == "<U+65E5>a<U+1F984><U+0009>" and ta.legible("") == ""


@pytest.mark.parametrize("path", [None, "map.png", "map.svg", "map.pdf"])
def test_example_is_literal_text_and_draws_without_a_warning(folder, tokenizer, say_instead, path):
    say_instead("$$ läuft $x^2 ß_{ 日")
    with no_warnings():
        figure = ta.draw_example(tiny_model(tokenizer), tokenizer, f"{SENTENCE} 🦄", path and Path(path))
        render(figure)
    weights, rows, columns, _ = ta.attention_maps(tiny_model(tokenizer), tokenizer, f"{SENTENCE} 🦄")
    shown = tick_names(figure.axes[0])
    assert shown == ([ta.legible(name) for name in rows], [ta.legible(name) for name in columns])
    text = "".join(columns)
    assert any("$$" in name for name in shown[1]) and "ü" in text and "<0xF0>" in columns
    assert "日" in text and "日" not in "".join(shown[1])
    assert shown[1][0] == "<bos>" and shown[1][-1] == "<eos>"
    torch.testing.assert_close(torch.tensor(figure.axes[0].images[0].get_array()), weights[-1].mean(0))
    title = figure.get_suptitle().split("\n")
    assert title[0] == "Cross-attention, layer 3 of 3, mean of 2 heads"
    assert title[1] == "Zwei Kinder bauen $$ für <U+65E5><U+672C> <U+1F984>"
    assert title[2] == "→ $$ läuft $x^2 ß_{ <U+65E5>"
    labels = [*figure.axes[0].get_xticklabels(), *figure.axes[0].get_yticklabels(), figure._suptitle]
    assert not any(label.get_parse_math() for label in labels)
    assert [file.name for file in folder.iterdir()] == ([path] if path else [])


def test_dollars_take_the_room_of_two_characters(tokenizer):
    """Read as a formula, "$x$" would be one italic letter."""
    figure = viz.draw_map(torch.ones(2, 2) / 2, ["$x$", "x"], ["$x$", "x"], "$x$", None)
    render(figure)
    for labels in (figure.axes[0].get_yticklabels(), figure.axes[0].get_xticklabels()):
        formula, letter = (label.get_window_extent().width for label in labels)
        assert formula > 2.5 * letter


@pytest.mark.parametrize("largest, top", [(0.05, 0.1), (0.33, 0.4), (0.4, 0.4), (0.97, 1.0), (1.0, 1.0)])
def test_darkest_colour_is_the_largest_weight_rounded_up(largest, top):
    weights = torch.tensor([[0.01, 0.02], [largest, 0.03]])
    names = ["a", "b"]
    figure = ta.draw(weights, names, names, "", ("", ""), None, "cross")
    assert figure.axes[0].images[0].get_clim() == (0, pytest.approx(top))
    figure = ta.draw(weights[None, None], names, names, "", ("", ""), None, "cross")
    assert figure.axes[0].images[0].get_clim() == (0, pytest.approx(top))


def test_long_names_do_not_overlap():
    names = ["▁Straßenbahn"] * 8
    figure = viz.draw_map(torch.ones(8, 8) / 8, names, names, "", None)
    render(figure)
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in zip(boxes, boxes[1:], strict=False))
    assert min(box.y0 for box in boxes) > 0 and figure.axes[0].get_window_extent().width > 350


def test_huge_picture_has_fewer_pixels(tmp_path, monkeypatch):
    monkeypatch.setitem(viz.save_figure.__globals__, "MOST_PIXELS", 1e6)  # of the module that viz imported
    viz.draw_map(torch.ones(60, 60) / 60, ["a"] * 60, ["a"] * 60, "", tmp_path / "map.png")
    height, width = matplotlib.image.imread(tmp_path / "map.png").shape[:2]
    assert 0.9e6 < height * width < 1.1e6


# ------------------------------------------------------------------------------------------------ the script


@pytest.mark.parametrize("kind", KINDS)
def test_layer_and_head_choose_the_map(folder, capsys, say_instead, drawn, tokenizer, kind):
    say_instead("Two children")
    weights, rows, columns, _ = ta.attention_maps(tiny_model(tokenizer), tokenizer, "Zwei Kinder", kind)
    choices = {
        (): (weights[2].mean(0), "layer 3 of 3, mean of 2 heads"),
        ("--layer", "1"): (weights[0].mean(0), "layer 1 of 3, mean of 2 heads"),
        ("--head", "2"): (weights[2, 1], "layer 3 of 3, head 2 of 2"),
        ("--layer", "2", "--head", "1"): (weights[1, 0], "layer 2 of 3, head 1 of 2"),
    }
    for options, (expected, words) in choices.items():
        assert run("Zwei Kinder", "--kind", kind, *options) == 0
        drawn_weights, *names, title, path, drawn_kind, _ = drawn["draw_map"]
        torch.testing.assert_close(drawn_weights, expected)
        assert names == [rows, columns] and words in title and drawn_kind == kind
        assert path == Path(f"{kind}_attn.png")
        assert f"{words}; each row sums to 1" in capsys.readouterr().out
    run("Zwei Kinder", "--kind", kind, "--grid", "--out", "all.svg")
    drawn_weights, *names, title, path, drawn_kind, _ = drawn["draw_grid"]
    torch.testing.assert_close(drawn_weights, weights)
    assert names == [rows, columns] and "every layer and head" in title and drawn_kind == kind
    assert path == Path("all.svg") and capsys.readouterr().out.count("smallest row maximum") == 3 * 2


def test_prints_what_each_piece_looks_at(folder, capsys, say_instead, drawn, tokenizer):
    say_instead("Two children")
    assert run("Zwei Kinder") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["source       Zwei Kinder", "translation  Two children"]
    assert lines[-1] == "wrote cross_attn.png"
    weights, rows, columns, output = ta.attention_maps(tiny_model(tokenizer), tokenizer, "Zwei Kinder")
    table = [line.split() for line in lines[4:-2]]
    assert [row[0] for row in table] == rows
    assert [row[1] for row in table] == tokenizer.pieces(output)
    largest, place = weights[-1].mean(0).max(1)
    assert [row[2] for row in table] == [columns[i] for i in place.tolist()]
    assert [row[3] for row in table] == [f"{value:.2f}" for value in largest.tolist()]
    run("Zwei Kinder", "--kind", "encoder")
    table = [line.split() for line in capsys.readouterr().out.splitlines()[4:-2]]
    assert [row[0] for row in table] == columns and all(len(row) == 3 for row in table)


@pytest.mark.parametrize("options", [[], ["--grid"], ["--kind", "encoder"], ["--kind", "decoder", "--grid"]])
def test_odd_characters_leave_no_mark_but_the_picture(folder, capsys, options):
    with no_warnings():
        assert run("$$ ü 日本 🦄 \t$", *options) == 0
    out, err = capsys.readouterr()
    assert err == "" and "source       $$ ü 日本 🦄 \t$" in out
    (picture,) = folder.iterdir()
    assert min(matplotlib.image.imread(picture).shape[:2]) > 600


def test_nothing_said(folder, capsys, say_instead, drawn):
    say_instead("")
    assert run("Ein Hund") == 0
    assert "translation  (nothing)" in capsys.readouterr().out
    assert drawn["draw_map"][1] == ["<bos>"] and drawn["draw_map"][3].endswith("→ nothing")


def test_script_from_another_folder_on_a_plain_terminal(folder):
    command = [*STRICT, "-m", "translation.attention", "Für 🦄", "--checkpoint", "../tiny.pt"]
    done = run_python(*command, folder=folder, PYTHONPATH=str(ROOT), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "F\\xfcr" in done.stdout and done.stdout.endswith("wrote cross_attn.png\n")
    assert [path.name for path in folder.iterdir()] == ["cross_attn.png"]


def test_import_does_nothing_and_help_shows_defaults():
    code = "import sys, translation.attention; assert not {'matplotlib', 'tensorboard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    text = " ".join(ta.build_parser().format_help().split())
    for default in (str(ta.CHECKPOINT), "cross", "last", "mean", "5", "auto"):
        assert f"(default: {default})" in text
    assert "SUPPRESS" not in text and "None" not in text


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "argv, parts",
    [
        ([""], ["sentence ''", "blank", "1 to 28"]),
        ([" \u00a0\n"], ["sentence ' \\xa0 '", "blank", "1 to 28"]),
        (["▁"], ["sentence '▁'", "blank", "1 to 28"]),
        (["\0"], ["sentence ''", "blank"]),
        (["日🦄" * 20], ["sentence '日🦄", "pieces; this model reads 1 to 28"]),
        (["a", "--layer", "4"], ["--layer 4", "1 to 3"]),
        (["a", "--layer", "0"], ["--layer", "'0'", "at least 1"]),
        (["a", "--head", "3"], ["--head 3", "1 to 2"]),
        (["a", "--kind", "self"], ["--kind", "'self'", "encoder"]),
        (["a", "--grid", "--layer", "1"], ["--grid", "--layer 1"]),
        (["a", "--beam", "0"], ["--beam", "'0'", "at least 1"]),
        (["a", "--out", "no/map.png"], ["--out no/map.png", "folder that exists"]),
        (["a", "--out", "map.docx"], ["--out map.docx", ".png"]),
        (["a", "--checkpoint", "none.pt"], ["--checkpoint none.pt", "translation.train"]),
        (["a", "--checkpoint", __file__], [f"--checkpoint {__file__}", "not a checkpoint"]),
        ([], ["sentence"]),
        (["Ein", "Hund"], ["Hund"]),
    ],
)
def test_mistakes(folder, capsys, argv, parts):
    with pytest.raises(SystemExit) as ended:
        run(*argv)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and not list(folder.iterdir())
    assert err.startswith("translation.attention: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert all(part in err for part in parts), err


def test_longest_sentence_is_read_and_one_piece_more_is_not(tokenizer):
    line = "$$ " * 28
    length = len(tokenizer.encode(line))
    ta.read_sentence(tiny_model(tokenizer, max_len=length + 2), tokenizer, line)
    with pytest.raises(ValueError, match=rf"is {length} pieces; this model reads 1 to {length - 1} pieces"):
        ta.read_sentence(tiny_model(tokenizer, max_len=length + 1), tokenizer, line)


def test_without_matplotlib(folder, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        run("Ein Hund")
    assert ended.value.code == 2 and "pip install matplotlib" in capsys.readouterr().err


def test_picture_that_cannot_be_written(folder, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ta, "draw_map", full)
    assert run("Ein Hund") == 2
    error = capsys.readouterr().err
    assert error.endswith(": error: cross_attn.png: cannot be written (No space left on device)\n")


# ----------------------------------------------------------------------------------------------- TensorBoard

TINY = ["--sample", "--d-model", "32", "--num-heads", "2", "--dff", "32", "--max-tokens", "1000"]
TINY += ["--vocab-size", "500", "--warmup", "40", "--device", "cpu"]


def train(out: Path, *options: str) -> dict:
    assert tt.main([*TINY, "--out", str(out), *options]) == 0
    return torch.load(out / "last.pt", weights_only=True)


def maps(out: Path) -> list:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(out / "tensorboard")).Reload()
    return events.Images("validation/attention") if events.Tags()["images"] else []


def test_one_map_per_validation_and_the_same_weights_as_without(tmp_path, monkeypatch):
    pytest.importorskip("sacrebleu")
    lines, draw_example = [], ta.draw_example

    def drawing(model, tokenizer, line, **options):
        lines.append(line)
        return draw_example(model, tokenizer, line, **options)

    monkeypatch.setattr("translation.curves.draw_example", drawing)
    last = train(tmp_path / "a", "--epochs", "4", "--bleu-every", "2")
    images = maps(tmp_path / "a")
    updates = [row["updates"] for row in last["history"]]
    assert [image.step for image in images] == [updates[1], updates[3]]
    assert lines == [load_split(None, "val")[0][0]] * 2
    (tmp_path / "map.png").write_bytes(images[-1].encoded_image_string)
    pixels = matplotlib.image.imread(tmp_path / "map.png")
    assert pixels.shape[2] == 3 and pixels.shape[1] >= 640 and pixels.std() > 0.05
    assert images[0].encoded_image_string != images[1].encoded_image_string

    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it now raises ModuleNotFoundError
    without = train(tmp_path / "b", "--epochs", "4", "--bleu-every", "2")
    assert not maps(tmp_path / "b")
    for name, value in without["model"].items():
        assert torch.equal(value, last["model"][name]), name


def test_no_map_where_no_bleu_is_measured(tmp_path):
    train(tmp_path, "--epochs", "1", "--bleu-every", "0")
    assert not maps(tmp_path)


# ------------------------------------------------------------------------------------------------- the page


def test_the_page_holds_every_map_and_can_be_written_again(folder, tokenizer, capsys):
    for _ in range(2):
        assert ta.main(["--checkpoint", "../tiny.pt", "--html", "a.html", "--beam", "2", SENTENCE]) == 0
        assert "wrote a.html" in capsys.readouterr().out
    data = page_data((folder / "a.html").read_text(encoding="utf-8"))
    assert [path.name for path in folder.iterdir()] == ["a.html"] and data["sentence"] == SENTENCE
    for kind in KINDS:
        weights, rows, columns, output = ta.attention_maps(
            tiny_model(tokenizer).eval(), tokenizer, SENTENCE, kind, beam=2
        )
        torch.testing.assert_close(torch.tensor(data["weights"][kind]), weights, atol=5.1e-5, rtol=0)
        assert rows == (data["source"] if kind == "encoder" else data["read"])
        assert columns == (data["read"] if kind == "decoder" else data["source"])
        assert data["writes"] == tokenizer.pieces(output)


def page_data(text: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="data">\n(.*?)\n</script>', text, re.S)[1]
    )


def test_the_page_shows_the_maps_in_a_browser(folder, browser, say_instead):
    say_instead("Two <b>children")
    assert ta.main(["--checkpoint", "../tiny.pt", "--html", "a.html", SENTENCE]) == 0
    data = page_data((folder / "a.html").read_text(encoding="utf-8"))
    browser.size(390, 844)
    browser.open((folder / "a.html").as_uri())
    assert browser.evaluate("document.querySelectorAll('.thumb').length") == 3 * 3 * 2
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    for kind in KINDS:
        browser.evaluate(f"document.getElementById('show.{kind}.2.1').click()")
        shown = browser.evaluate("""[...document.querySelectorAll("#map tr")].map(row =>
            [...row.cells].map(cell => cell.textContent))""")
        assert shown[0][1:] == (data["read"] if kind == "decoder" else data["source"])
        names = data["source"]
        if kind != "encoder":
            names = [f"{a} → {b}" for a, b in zip(data["read"], data["writes"], strict=True)]
        assert [row[0] for row in shown[1:]] == names
        for i, cells in enumerate(shown[1:]):
            for j, text in enumerate(cells[1:]):
                weight = data["weights"][kind][1][0][i][j]
                assert float(text) == pytest.approx(weight, abs=0.0051), (kind, i, j)
                assert (text == "0") == (kind == "decoder" and j > i)
    assert browser.complaints() == []
