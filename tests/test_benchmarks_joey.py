"""The comparison with JoeyNMT on the built-in sample: same model, tokens and greedy output; one-line errors.

What needs JoeyNMT is skipped where it is not installed. No time is asserted.
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import translation.train as tt
from benchmarks import joey
from model import Transformer
from translation.data import LangPairDataset, Tokenizer, collate
from translation.decode import beam_search
from translation.options import PRESETS
from translation.prepare import load_split

pytest.importorskip("sentencepiece", reason="needs translation/requirements.txt")
CPU = torch.device("cpu")


@pytest.fixture
def package():
    try:
        return joey.load_joey()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture
def small_is_sample(monkeypatch):
    monkeypatch.setitem(PRESETS, "small", PRESETS["sample"])


@pytest.fixture(scope="module")
def text():
    return load_split(None, "train")


@pytest.fixture(scope="module")
def tokenizer(text):
    return Tokenizer.train([*text[0], *text[1]], 800)


def random_model(vocab_size: int, **options) -> Transformer:
    """With every weight random, also those that start at 0 or 1."""
    torch.manual_seed(0)
    sizes = dict(d_model=16, num_heads=2, dff=32, num_layers=2, max_len=130)
    model = Transformer(vocab_size, vocab_size, **sizes, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    "options",
    [
        dict(norm_first=False, activation="relu", share_embeddings=True),
        dict(norm_first=True, activation="gelu", share_embeddings=False),
        dict(norm_first=True, activation="relu", tie_output=True),
    ],
)
def test_with_our_weights_joeynmt_computes_the_same(package, text, tokenizer, options, capsys):
    model = random_model(tokenizer.vocab_size, **options)
    pairs = LangPairDataset(*text, tokenizer).pairs
    peer = joey.build_peer(package, model.settings, tokenizer).eval()
    make_batch = joey.batch_maker(package, peer, tokenizer, pairs, CPU)
    rows = [3, 0, 40, 41, 7]
    ours, theirs = collate([pairs[i] for i in rows]), make_batch(rows)
    with pytest.raises(RuntimeError, match="differ"):
        joey.check_twin(model, peer, ours, theirs, smoothing=0.1)
    joey.copy_weights(model, peer, output_bias=False)
    with pytest.raises(RuntimeError, match="differ"):  # this model's is not 0
        joey.check_twin(model, peer, ours, theirs, smoothing=0.1)
    joey.copy_weights(model, peer, output_bias=True)
    joey.check_twin(model, peer, ours, theirs, smoothing=0.1)
    assert {part.eps for part in peer.modules() if isinstance(part, torch.nn.LayerNorm)} == {1e-5}

    assert theirs.ntokens == (ours["labels"] != 0).sum()
    to_ours = joey.joey_rows(tokenizer.vocab_size)
    assert torch.equal(to_ours[theirs.src], ours["src"]) and torch.equal(to_ours[theirs.trg], ours["labels"])
    greedy, _, _ = package.search.search(peer, theirs, 12, 1, 0.0, min_output_length=0)
    found = [h.ids for h in beam_search(model, ours["src"], beam=1, max_len=12)]
    assert [
        row[: len(ids)] for row, ids in zip(to_ours[torch.as_tensor(greedy)].tolist(), found, strict=True)
    ] == found


def test_training_changes_both_models(package, text, monkeypatch, capsys):
    models, honest = [], joey.copy_weights

    def remember(model, peer, output_bias):
        honest(model, peer, output_bias)
        models.extend((m, [p.clone() for p in m.parameters()]) for m in (model, peer))

    monkeypatch.setattr(joey, "copy_weights", remember)
    args = joey.recipe("sample")
    results = joey.measure_training(package, text, args, 2, "bf16", CPU)
    for model, before in models:
        assert model.training
        assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert results["updates"] == 2 and results["target_tokens"] > 0 and results["ratio"]["median"] > 0


def test_training_refuses_batches_that_differ(package, text, monkeypatch, capsys):
    honest = joey.batch_maker

    def forgetful(*args):
        make_batch = honest(*args)
        return lambda rows: make_batch(rows[1:])

    monkeypatch.setattr(joey, "check_twin", lambda *args: None)
    monkeypatch.setattr(joey, "batch_maker", forgetful)
    with pytest.raises(RuntimeError, match="target tokens"):
        joey.measure_training(package, text, joey.recipe("sample"), 2, "fp32", CPU)


def test_the_command_measures_both_parts(package, small_is_sample, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(joey, "BATCH", 4)
    for split in ("train", "test"):
        for language, lines in zip(("de", "en"), load_split(None, split), strict=True):
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = ["--sample", "--epochs", "1", "--bleu-every", "0", "--out", str(tmp_path / "run")]
    assert tt.main([*run, "--device", "cpu"]) == 0
    options = ["--data", str(tmp_path), "--split", "test", "--updates", "2", "--device", "cpu"]
    assert joey.main(options) == 0
    assert "decoding is left out" in capsys.readouterr().out
    options += ["--checkpoint", str(tmp_path / "run" / "best.pt"), "--sentences", "6", "--rounds", "2"]
    assert joey.main([*options, "--json", str(tmp_path / "joey.json")]) == 0
    document = json.loads((tmp_path / "joey.json").read_text(encoding="utf-8"))
    assert document["torch"] == torch.__version__ and document["joeynmt"] == package.__version__
    for part in joey.PARTS:
        assert all(document[part][name]["median"] > 0 for name in (joey.OURS, joey.THEIRS, "ratio"))
    assert document["decode"]["sentences"] == 6 and 0 <= document["decode"]["same_outputs"] <= 6


def test_ratios_are_taken_turn_by_turn(capsys):
    results = joey.report({joey.OURS: [2.0, 4.0, 30.0], joey.THEIRS: [1.0, 4.0, 10.0]}, "tokens/s")
    assert results[joey.OURS]["median"] == 4 and results["ratio"] == dict(median=2, low=1.5, high=2.5)
    assert joey.spread([3.0]) == dict(median=3, low=3, high=3)
    assert "2.00 x" in capsys.readouterr().out


def one_line_error(argv, capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        joey.main(argv)
    output = capsys.readouterr()
    assert stop.value.code == 2 and output.out == "" and output.err.count("\n") == 1
    return output.err


def test_without_joeynmt_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "joeynmt", None)
    assert "joeynmt is not installed: pip install joeynmt" in one_line_error([], capsys)


@pytest.mark.parametrize(
    "options, word",
    [
        (["--updates", "1"], "--updates"),
        (["--precision", "fp16"], "--precision"),
        (["--parts", "decode"], "--checkpoint"),
        (["--json", "no/such/x.json"], "--json no/such/x.json"),
        (["--data", "no/such"], "no/such/train.de"),
        (["--checkpoint", "no/such.pt"], "no/such.pt"),
    ],
)
def test_errors_are_one_line(options, word, monkeypatch, capsys):
    monkeypatch.setattr(joey, "load_joey", lambda: SimpleNamespace(__version__="0"))
    assert word in one_line_error(options, capsys)
