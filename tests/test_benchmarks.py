"""The benchmarks on tiny sizes: they run, compare what they time, report quotients. No time is asserted."""

import json
import sys

import pytest
import torch

import train
from benchmarks import decode_time, memory, peers, recipes, run, step_time
from toolbox import measure

CPU = torch.device("cpu")


@pytest.fixture
def tiny_recipes(monkeypatch):
    for name, recipe in train.RECIPES.items():
        monkeypatch.setitem(train.RECIPES, name, recipe | dict(samples=64, batch_size=32, warmup=1, epochs=2))
    monkeypatch.setattr(recipes, "TEST_SIZE", 20)


@pytest.fixture
def no_peers(monkeypatch):
    monkeypatch.setitem(sys.modules, "x_transformers", None)
    monkeypatch.setitem(sys.modules, "transformers", None)


def test_compare_reports_quotients_of_the_medians(monkeypatch, capsys):
    times = {"a": [1.0, 2.0, 3.0], "b": [8.0, 8.0, 8.0]}
    monkeypatch.setattr(measure, "take_turns", lambda *args, **options: times)
    results = measure.compare({}, 3, 0, CPU, "")
    assert results["a"] == dict(median_ms=2.0, low_ms=1.5, high_ms=2.5, ratio=1.0)
    assert results["b"]["ratio"] == 4.0
    assert capsys.readouterr().out.splitlines()[1].endswith(" 8.0 ms  (8.0 - 8.0)    4.00 x")


def test_a_missing_peer_is_left_out_and_named(no_peers, capsys):
    settings = train.make_model(step_time.RUN).settings
    assert peers.x_transformer(settings) is None and peers.bart(settings) is None
    out = capsys.readouterr().out
    assert "pip install x-transformers" in out and "pip install transformers" in out


def test_step_time(no_peers, capsys):
    results = step_time.measure(CPU, rounds=2, batch_size=4)
    assert list(results) == ["model.py", "nn.Transformer"] and results["model.py"]["ratio"] == 1


def test_a_timed_step_is_a_training_step():
    model = train.make_model(step_time.RUN)
    before = [p.clone() for p in model.parameters()]
    step = step_time.training_step(model, CPU, 4, "fp32")
    step(), step()
    assert model.training
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_decode_time(no_peers, capsys):
    results = decode_time.measure(CPU, strings=6, batch=2, lengths=(5, 9), rounds=2)
    assert list(results) == [
        "6 strings, 13 tokens",
        "2 strings, 5 tokens",
        "2 strings, 9 tokens",
        "growth_power",
    ]
    assert all(list(results[what]) == ["cache", "cache, SDPA", "no cache"] for what in list(results)[:3])


def test_decode_time_refuses_contenders_that_disagree(no_peers, monkeypatch):
    honest = decode_time.decode_all
    monkeypatch.setattr(
        decode_time, "decode_all", lambda m, src, n, cache: honest(m, src, n, cache) + int(cache)
    )
    with pytest.raises(RuntimeError, match="same tokens"):
        decode_time.measure(CPU, strings=6, batch=2, lengths=(5, 9), rounds=2)


def test_memory_by_hand_holds_the_score_matrices():
    rows = memory.measure(CPU, lengths=(32, 64, 256), batches=(1, 2))
    by_shape = {(row["batch"], row["length"]): row for row in rows}
    assert list(by_shape) == [(2, 32), (2, 64), (2, 256), (1, 64)]
    matrices = 6 * 2 * 4 * 256 * 256 * 4  # six attentions, B=2, h=4, fp32
    assert by_shape[2, 256]["manual"] - by_shape[2, 256]["sdpa"] > matrices / 2
    for kind in ("manual", "sdpa"):
        assert by_shape[2, 256][kind] > by_shape[2, 64][kind] > by_shape[1, 64][kind] > 0


def test_recipes_are_timed_in_turns_and_stop_at_the_goal(tiny_recipes, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "GOAL", 0.0)
    results = recipes.measure(CPU, seeds=2)
    assert results["chapter"]["updates"] == 2 and len(results["fast"]) == 2  # as many as asked for
    mean = sum(result["seconds"] for result in results["fast"]) / 2  # of two, the median
    assert results["ratio"] == pytest.approx(results["chapter"]["seconds"] / mean)
    monkeypatch.setattr(recipes, "GOAL", 1.1)
    results = recipes.measure(CPU, seeds=2)
    assert results["chapter"]["updates"] == 4 and len(results["fast"]) == 2
    assert "lower bound" in capsys.readouterr().out


def test_seeds_reach_both_parts_of_recipes(monkeypatch):
    seen = []
    for part in ("measure", "ablation"):
        monkeypatch.setattr(
            recipes, part, lambda device, precision, seeds, part=part: seen.append((part, seeds))
        )
    for options in ([], ["--seeds", "7"], ["--ablation"], ["--ablation", "--seeds", "7"]):
        assert recipes.main([*options, "--device", "cpu"]) == 0
    assert seen == [("measure", 5), ("measure", 7), ("ablation", 2), ("ablation", 7)]


def test_ablation_changes_one_part_at_a_time():
    fast = train.RECIPES["fast"]
    for name, recipe in recipes.variants().items():
        assert recipe["epochs"] * (recipe["samples"] // recipe["batch_size"]) == 200, name
        changed = {key for key in fast if recipe[key] != fast[key]} - {"epochs", "samples"}
        schedule = {"peak", "warmup"}  # one part, two numbers
        assert len(changed) <= 1 or changed == schedule or name.startswith("chapter"), (name, changed)


def test_run_writes_json_and_picture(monkeypatch, tmp_path, capsys):
    rows = {"manual": 4e6, "sdpa": 2e6, "batch": 2, "length": 8}
    times = {name: dict(median_ms=value) for name, value in (("cache", 1.0), ("no cache", 7.0))}
    fast = [dict(seconds=value) for value in (3.0, 1.0, 2.0)]
    monkeypatch.setitem(run.MEASURE, "memory", lambda device, precision: [rows])
    monkeypatch.setitem(run.MEASURE, "decoding", lambda device, precision: {"4 strings, 64 tokens": times})
    monkeypatch.setitem(run.MEASURE, "step", lambda device, precision: times)
    monkeypatch.setitem(run.MEASURE, "recipes", lambda *_: dict(chapter=dict(seconds=20.0), fast=fast))
    paths = ["--json", str(tmp_path / "a.json"), "--out", str(tmp_path / "a.png")]
    assert run.main(["--only", "memory", "decoding", "step", "recipes", *paths]) == 0
    document = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert document["memory"] == [rows] and document["torch"] == torch.__version__
    assert document["precision"] == dict(memory="fp32", decoding="fp32", step="fp32", recipes="fp32")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_every_section_records_the_precision_it_computes_in(monkeypatch, tmp_path, capsys):
    """A GPU with bf16: training is measured in it, decoding is not, and says so."""
    told = {}
    for name in ("step", "decoding"):
        monkeypatch.setitem(
            run.MEASURE, name, lambda device, precision, name=name: told.update({name: precision})
        )
    monkeypatch.setattr(measure, "choose_precision", lambda name, device: ("bf16", "autocast"))
    monkeypatch.setattr(run, "draw", lambda *_: None)
    path = tmp_path / "a.json"
    assert run.main(["--only", "step", "decoding", "--json", str(path), "--device", "cpu"]) == 0
    assert json.loads(path.read_text(encoding="utf-8"))["precision"] == dict(step="bf16", decoding="fp32")
    assert told["step"] == "bf16"


def test_decoding_runs_without_autocast(no_peers, monkeypatch, capsys):
    enabled, honest = set(), train.greedy_decode

    def spy(*args):
        enabled.add(torch.is_autocast_enabled("cpu"))
        return honest(*args)

    monkeypatch.setattr(decode_time, "greedy_decode", spy)
    decode_time.measure(CPU, strings=2, batch=2, lengths=(2, 3), rounds=2)
    assert enabled == {False} and capsys.readouterr().out.count(f", {decode_time.PRECISION}:") == 3


def test_a_discarded_step_comes_before_the_recipes_and_changes_nothing(tiny_recipes, monkeypatch, capsys):
    made, honest_step, honest_epoch = [], recipes.training_step, recipes.Run.epoch

    def epoch(run):
        score = honest_epoch(run)
        made.append(sum(p.double().abs().sum().item() for p in run.model.parameters()))
        return score

    def weights_after(step):
        made.clear()
        monkeypatch.setattr(recipes, "training_step", lambda *args: made.append("step") or step(*args))
        recipes.measure(CPU, seeds=1)
        assert made[0] == "step" and made.count("step") == 1 and len(set(made)) >= 3
        return list(made)

    monkeypatch.setattr(recipes.Run, "epoch", epoch)
    assert weights_after(honest_step) == weights_after(lambda *args: lambda: None)


def test_the_twin_never_asks_whether_its_mask_is_causal(monkeypatch):
    """That question makes Python wait for the GPU in every forward pass."""
    import torch.nn.modules.transformer as theirs

    from benchmarks.torch_twin import TorchTransformer

    model = TorchTransformer(train.make_model(step_time.RUN).settings).eval()
    src, tgt = train.make_dataset(4, 0)
    honest, asked = theirs._detect_is_causal_mask, []

    def spy(mask, is_causal=None, size=None):
        asked.append(mask is not None and is_causal is None)
        return honest(mask, is_causal, size)

    monkeypatch.setattr(theirs, "_detect_is_causal_mask", spy)
    model(src, tgt[:, :-1])
    assert asked and not any(asked)


def test_run_measures_attention(capsys):
    rows = run.attention(CPU, "fp32", batch=2, length=8, d_model=16, heads=2)
    assert [row["contender"] for row in rows] == ["by hand", "tiles", "SDPA", "by hand", "SDPA"]
    assert "B=2, L=8, d_model=16, h=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "script, options, word",
    [
        (run, ["--only", "everything"], "everything"),
        (run, ["--json", "no/such/x.json"], "--json no/such/x.json"),
        (run, ["--out", "x.txt"], "--out x.txt"),
        (step_time, ["--rounds", "1"], "--rounds"),
        (decode_time, ["--rounds", "0"], "--rounds"),
        (recipes, ["--seeds", "11"], "--seeds"),
        (memory, ["--device", "tpu"], "--device"),
    ],
)
def test_errors_are_one_line(script, options, word, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(options)
    output = capsys.readouterr()
    assert stop.value.code == 2 and output.out == "" and output.err.count("\n") == 1 and word in output.err


def test_results_that_cannot_be_written_are_one_line(monkeypatch, capsys, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(run.MEASURE, "memory", lambda *_: [])
    monkeypatch.setattr(run, "draw", full)
    paths = ["--json", str(tmp_path / "a.json"), "--out", str(tmp_path / "a.png")]
    assert run.main(["--only", "memory", "--device", "cpu", *paths]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.run: error: ") and error.count("\n") == 1 and "No space" in error
