"""translation/translate.py and evaluate.py: order, blank lines, files, scores, what a user can get wrong."""

import gzip
import io
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("sentencepiece")
pytest.importorskip("sacrebleu")

from processes import ROOT
from translation_runs import TINY

import translation.bleu as bleu
import translation.evaluate as evaluate
import translation.train as tt
import translation.translate as translate_script
from model import Transformer
from train import EOS_ID
from translation.checkpoint import load_translator
from translation.data import LangPairDataset, Tokenizer, collate
from translation.decode import beam_search, translate_lines
from translation.prepare import load_split
from translation.run import make_optimizer
from translation.translate import translate


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model after 40 short epochs: its outputs are poor, but of several lengths and not all the same."""
    out = tmp_path_factory.mktemp("run")
    tt.open_tensorboard, kept = lambda *_: None, tt.open_tensorboard
    try:
        assert tt.main([*TINY, "--epochs", "40", "--out", str(out)]) == 0
    finally:
        tt.open_tensorboard = kept
    return out


@pytest.fixture(scope="module")
def lines():
    return load_split(None, "test")[0]


def command(run, *argv):
    return translate_script.main(["--checkpoint", str(run), "--device", "cpu", *map(str, argv)])


def typed(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


# ------------------------------------------------------------------------------------------------- function


def test_as_many_translations_as_lines_in_their_order(run, lines):
    mixed = [lines[0], "", lines[1], " \t", lines[2]]
    together = translate(mixed, run, device="cpu")
    assert together[1] == together[3] == "" and all(together[::2])
    assert together == [translate([line], run, device="cpu")[0] for line in mixed]
    assert translate([], run, device="cpu") == []


def test_result_does_not_depend_on_batches_or_order(run, lines):
    expected = translate(lines, run, device="cpu", batch_size=64)
    assert len(set(expected)) > len(lines) // 2
    for size in (1, 2, 7):
        assert translate(lines, run, device="cpu", batch_size=size) == expected
    assert translate(lines[::-1], run, device="cpu") == expected[::-1]


def test_beam_and_alpha_are_heard(run, lines):
    model, tokenizer, _ = load_translator(run)
    assert translate(lines, run, beam=1, device="cpu") == tt.greedy_translate(model, tokenizer, lines)
    assert translate(lines, run, beam=4, device="cpu") != translate(lines, run, beam=1, device="cpu")
    short, long = (
        sum(map(len, translate(lines, run, beam=4, alpha=alpha, device="cpu"))) for alpha in (0.0, 4.0)
    )
    assert short < long


def test_the_model_is_read_once_and_again_when_it_changes(run, lines, tmp_path, monkeypatch):
    """A path of its own: translate keeps what it has read for as long as the file stays what it was."""
    calls, load = [], translate_script.load_translator
    monkeypatch.setattr(translate_script, "load_translator", lambda *a: calls.append(a) or load(*a))
    path = tmp_path / "model.pt"
    checkpoint = torch.load(run / "averaged.pt", weights_only=True)
    torch.save(checkpoint, path)
    first = translate(lines[:2], path, device="cpu")
    assert translate(lines[:2], path, device="cpu") == first and len(calls) == 1
    for value in checkpoint["model"].values():
        value.zero_()
    torch.save(checkpoint, path)
    assert translate(lines[:2], path, device="cpu") != first and len(calls) == 2


def test_blank_lines_never_reach_the_model(run, monkeypatch):
    monkeypatch.setattr("translation.decode.beam_search", lambda *a: pytest.fail("the model was called"))
    assert translate(["", "   ", "\u2028", "\0", "\t\0"], run, device="cpu") == [""] * 5


def test_progress_counts_the_lines_done(run, lines):
    model, tokenizer, _ = load_translator(run)
    heard = []
    translate_lines(model, tokenizer, lines[:10], batch_size=4, report=heard.append)
    assert heard == [0, 4, 8]


def test_an_output_without_end_stops_at_the_limit_of_its_own_source(run, lines, monkeypatch):
    model, tokenizer, _ = load_translator(run)
    decode, longest = model.decode, model.settings["max_len"]

    def endless(*args):
        logits, weights = decode(*args)
        return logits.index_fill(-1, torch.tensor(EOS_ID), -torch.inf), weights

    sources = [lines[0], "Ein", "Hund " * longest]
    limits = [min(2 * len(tokenizer.encode(line)[: longest - 2]) + 10, longest) for line in sources]
    assert len(set(limits)) == 3 and max(limits) == longest
    monkeypatch.setattr(model, "decode", endless)
    monkeypatch.setattr(tokenizer, "decode", len)
    assert translate_lines(model, tokenizer, sources) == limits


# -------------------------------------------------------------------------------------------------- command


def test_sentences_as_arguments(run, lines, capsys):
    assert command(run, lines[0], "", lines[1]) == 0
    expected = translate([lines[0], "", lines[1]], run, device="cpu")
    assert capsys.readouterr().out == "".join(line + "\n" for line in expected)


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_standard_input_line_by_line(run, lines, capsys, monkeypatch, batch):
    """BOM, CRLF, U+2028 in a line, blank lines, no newline at the end: one output line per input line."""
    text = f"\ufeff{lines[0]}\r\n\n   \n{lines[1]}\u2028Ende\n{lines[2]}"
    typed(monkeypatch, text.encode())
    assert command(run, "--batch-size", batch) == 0
    expected = translate([lines[0], "", "   ", lines[1] + " Ende", lines[2]], run, device="cpu")
    assert capsys.readouterr().out == "".join(line + "\n" for line in expected)


def test_a_bom_alone_is_no_line_on_standard_input_as_in_a_file(monkeypatch, tmp_path):
    for text, lines in (("\ufeff", []), ("\ufeff\n", [""]), ("", []), ("\n\ufeff", ["", "\ufeff"])):
        typed(monkeypatch, text.encode())
        (tmp_path / "text").write_bytes(text.encode())
        assert list(translate_script.stdin_lines()) == translate_script.read_lines(tmp_path / "text") == lines


def test_empty_input_gives_empty_output(run, capsys, monkeypatch, tmp_path):
    typed(monkeypatch, b"")
    assert command(run) == 0 and capsys.readouterr().out == ""
    (tmp_path / "empty.de").write_bytes(b"")
    assert command(run, "--input", tmp_path / "empty.de", "--output", tmp_path / "empty.en") == 0
    assert (tmp_path / "empty.en").read_bytes() == b""


def test_lines_before_a_broken_one_are_translated(run, lines, capsys, monkeypatch):
    typed(monkeypatch, f"{lines[0]}\n".encode() + b"\xff\xfe\n")
    with pytest.raises(SystemExit) as end:
        command(run, "--batch-size", 1)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and "standard input: line 2 is not UTF-8" in err and err.count("\n") == 1
    assert out == translate(lines[:1], run, device="cpu")[0] + "\n"


def test_files_plain_and_gzip(run, lines, tmp_path, capsys):
    first, second = tmp_path / "a.de", tmp_path / "b.de.gz"
    first.write_text("\n".join(lines[:3]) + "\n", encoding="utf-8")
    second.write_bytes(gzip.compress("\n".join(lines[3:5]).encode()))
    assert command(run, "--input", first, second, "--output", tmp_path / "a.en", tmp_path / "b.en") == 0
    expected = translate(lines[:5], run, device="cpu")
    assert (tmp_path / "a.en").read_text(encoding="utf-8").splitlines() == expected[:3]
    assert (tmp_path / "b.en").read_text(encoding="utf-8").splitlines() == expected[3:]
    capsys.readouterr()
    assert command(run, "--input", first, second) == 0
    assert capsys.readouterr().out.splitlines() == expected


def test_a_sentence_too_long_is_read_from_its_start_and_named(run, capsys, monkeypatch):
    assert command(run, "Hund " * 300) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert re.search(r"note: sentence 1 has \d+ pieces; the model reads the first 128\n", err)
    typed(monkeypatch, b"Hund\n\n" + b"Hund " * 300)
    assert command(run, "--batch-size", 1) == 0
    assert "note: line 3 has" in capsys.readouterr().err


def test_as_a_program_from_another_folder(run, lines, tmp_path):
    """Output to a pipe in a locale without umlauts is UTF-8 all the same."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom translation.translate import main; main()"
    options = ["--checkpoint", str(run), "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", start, *options],
        cwd=tmp_path, input="\n".join(lines[:3]).encode(), capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == translate(lines[:3], run, device="cpu")


def test_after_learning_twenty_pairs_by_heart_every_output_ends_with_eos():
    """B20: the labels teach <eos> after the last piece of every row, short or long, and nothing after it."""
    src, tgt = (side[:20] for side in load_split(None, "train"))
    tokenizer = Tokenizer.train([*src, *tgt], 500)
    data = LangPairDataset(src, tgt, tokenizer)
    torch.manual_seed(0)
    model = Transformer(*[tokenizer.vocab_size] * 2, d_model=64, num_heads=4, dff=128, num_layers=1,
                        max_len=130, dropout=0.0, norm_first=False, share_embeddings=True)  # fmt: skip
    optimizer, scheduler = make_optimizer(model, warmup=40, factor=0.5)
    batch = collate([data[i] for i in range(20)])
    for _ in range(150):
        tt.train_step(model, optimizer, scheduler, batch, "fp32", 0.1, 1.0)
    found = beam_search(model, batch["src"], beam=1)
    assert all(hypothesis.ids[-1] == EOS_ID for hypothesis in found)
    assert [tokenizer.decode(hypothesis.ids) for hypothesis in found] == tgt


# ------------------------------------------------------------------------------------------------- evaluate


def scored(run, capsys, *argv):
    status = evaluate.main(["--checkpoint", str(run), "--device", "cpu", "--sample", *map(str, argv)])
    return status, capsys.readouterr().out


def test_scores_of_known_text():
    """B41: one reference per hypothesis, in order; case counts in one BLEU and not in the other."""
    text = ["The cat sits on the mat.", "Two dogs run in the park.", "A man reads a long book."]
    perfect = bleu.scores(text, text)
    assert [round(score, 6) for score, _ in perfect.values()] == [100, 100, 100]
    assert list(perfect) == ["BLEU", "BLEU -lc", "chrF"]
    assert "case:mixed" in perfect["BLEU"][1] and "case:lc" in perfect["BLEU -lc"][1]
    assert "tok:13a" in perfect["BLEU"][1] and "nc:6" in perfect["chrF"][1]
    spoiled = bleu.scores([*text[:2], "Nothing."], text)
    assert all(score < 99 for score, _ in spoiled.values())
    shouted = bleu.scores([line.upper() for line in text], text)
    assert shouted["BLEU"][0] < 5 and shouted["BLEU -lc"][0] == pytest.approx(100)
    assert all(score == 0 for score, _ in bleu.scores([""] * 3, text).values())
    for hypotheses in (text[:2], [*text, "One more."]):
        with pytest.raises(ValueError, match=f"{len(hypotheses)} hypotheses, 3 references"):
            bleu.scores(hypotheses, text)


def test_evaluate_scores_what_translate_says(run, lines, capsys, tmp_path):
    status, out = scored(run, capsys, "--split", "test", "--out", tmp_path / "test.en", "--show", 2)
    assert status == 0
    hypotheses, references = translate(lines, run, device="cpu"), load_split(None, "test")[1]
    assert (tmp_path / "test.en").read_text(encoding="utf-8").splitlines() == hypotheses
    for name, (score, signature) in bleu.scores(hypotheses, references).items():
        assert f"{name:8} {score:.2f}  ({signature})" in out
    assert "free-running, beam 5, alpha 0.6" in out
    assert out.count("  reference  ") == 2 and f"  output     {hypotheses[1]}" in out
    assert "▁" not in "".join(hypotheses)  # plain text, not pieces


def test_references_are_not_seen_while_decoding(run, capsys, tmp_path, monkeypatch):
    """B42: with garbage for references the hypotheses are the same, and only the scores fall."""
    _, honest = scored(run, capsys, "--split", "train", "--out", tmp_path / "a")
    load = evaluate.load_split
    monkeypatch.setattr(evaluate, "load_split", lambda *a: (load(*a)[0], ["zzz qqq"] * len(load(*a)[0])))
    _, garbage = scored(run, capsys, "--split", "train", "--out", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert re.search(r"BLEU     0\.00", garbage) and not re.search(r"BLEU     0\.00", honest)


# --------------------------------------------------------------------------------------------------- errors


def test_without_sacrebleu_it_says_what_to_install(run, capsys, monkeypatch):
    """Scoring ends before the decoding begins; translating needs no sacrebleu."""
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    monkeypatch.setattr(evaluate, "translate_lines", lambda *a: pytest.fail("decoded in vain"))
    with pytest.raises(SystemExit) as end:
        evaluate.main(["--checkpoint", str(run), "--device", "cpu", "--sample", "--split", "test"])
    assert end.value.code == 2
    assert (
        "sacrebleu is not installed: pip install -r translation/requirements.txt" in capsys.readouterr().err
    )
    assert command(run, "Ein Hund.") == 0


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--beam", "0"], "--beam: '0' is not"),
        (["--alpha", "-1"], "--alpha: '-1' is not"),
        (["--batch-size", "0"], "--batch-size: '0' is not"),
        (["--input", "missing.de"], "missing.de: cannot be read"),
        (["--output", "x.en"], "--output: 1 files for 0 of --input"),
        (["--input", "a.de", "--output", "no/such/x.en"], "--output no/such/x.en: must be a file in"),
        (["--input", "a.de", "--output", "a.de"], "--output a.de: is also the file of --input"),
        (["Hallo.", "--input", "a.de"], "--input a.de: leave it out, or the sentence 'Hallo.'"),
        (["Hallo.", "--checkpoint", "none.pt"], "--checkpoint none.pt: no such checkpoint"),
        (["Hallo.", "--checkpoint", "."], "best.pt: no such checkpoint"),
    ],
)  # fmt: skip
def test_translate_errors_are_one_line(run, tmp_path, capsys, monkeypatch, argv, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.de").write_text("Hallo.\n")
    with pytest.raises(SystemExit) as end:
        command(run, *argv)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1) and text in err
    assert (tmp_path / "a.de").read_text() == "Hallo.\n"


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--data", "nowhere"], "test_2016_flickr.de: no such file"),
        (["--sample", "--split", "tset"], "tset"),
        (["--sample", "--split", "test", "--out", "no/such/file"], "--out no/such/file: must be a file"),
        (["--sample", "--split", "test", "--show", "-1"], "--show: '-1' is not"),
        (["--sample", "--split", "test", "--checkpoint", "a.pt"], "--checkpoint a.pt: no such checkpoint"),
    ],
)  # fmt: skip
def test_evaluate_errors_are_one_line(run, tmp_path, capsys, monkeypatch, argv, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        evaluate.main(["--checkpoint", str(run), "--device", "cpu", *argv])
    out, err = capsys.readouterr()
    assert (end.value.code, err.count("\n")) == (2, 1) and text in err and "BLEU" not in out
