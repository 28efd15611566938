"""benchmarks.gpu_check as far as the CPU can show: the dry run, what it says of faults, its tables."""

import json

import pytest
import torch

from benchmarks import gpu_check, gpu_parts, gpu_table
from benchmarks.gpu_parts import PARTS, Setting

CPU = torch.device("cpu")


def document(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_without_a_gpu_one_line_and_status_2(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        gpu_check.main([])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1 and "--dry-run" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_dry_run_goes_through_every_part_and_writes_after_each(tmp_path, monkeypatch, capsys):
    path, written, honest = tmp_path / "a.json", [], gpu_check.write_text

    def write_text(*args):
        honest(*args)
        written.append(list(document(path)["parts"]))

    monkeypatch.setattr(gpu_check, "write_text", write_text)
    threads = torch.get_num_threads()
    assert gpu_check.main(["--dry-run", "--json", str(path)]) == 0
    assert written == [list(PARTS)[: n + 1] for n in range(len(PARTS))]
    found, out = document(path), capsys.readouterr().out
    assert found["dry_run"] is True and "none of these figures means anything" in out
    for name, part in found["parts"].items():
        assert "error" not in part and all(part.get("claims", {}).values()), (name, part)
        left_out = name == "translation" and "left_out" in part  # its packages are not installed
        assert left_out or len(part) > 1, name
    assert len(found["parts"]["sdpa"]["cells"]) == 5 * 2 * 5 * 2
    assert set(found["parts"]["benchmarks"]) >= {"attention", "step", "decoding", "memory", "recipes"}
    assert "| causal self-attention" in out and "| token accuracy, epoch 1 | 0.795 | 0." in out
    assert torch.get_num_threads() == threads and gpu_parts.train.D_MODEL == 128


def test_a_part_that_breaks_does_not_take_the_others_with_it(tmp_path, monkeypatch, capsys):
    def broken(setting):
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setitem(PARTS, "tests", broken)
    monkeypatch.setitem(PARTS, "step", lambda setting: dict(claims={"faster": False, "right": True}))
    path = tmp_path / "a.json"
    options = ["--dry-run", "--json", str(path), "--only", "versions", "tests", "step"]
    assert gpu_check.main(options) == 1
    parts, out = document(path)["parts"], capsys.readouterr().out
    assert list(parts) == ["versions", "tests", "step"] and "illegal memory" in parts["tests"]["traceback"]
    assert "REFUTED   step: faster" in out and "2 of 3 claims hold" in out
    assert "BROKE     tests: RuntimeError: CUDA error: an illegal memory access and more" in out
    assert gpu_check.main([*options[:-2]]) == 0


def test_no_part_begins_after_the_minutes(tmp_path, capsys):
    path = tmp_path / "a.json"
    assert gpu_check.main(["--dry-run", "--minutes", "0", "--json", str(path), "--only", "versions"]) == 0
    assert document(path)["parts"]["versions"]["left_out"] == "--minutes 0 are over"
    assert "LEFT OUT  versions" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["causal", "padding", "fully masked row"])
def test_a_backend_that_is_wrong_is_noticed(case, monkeypatch):
    def verdict():
        return gpu_parts.sdpa_cell("math", case, 13, torch.float32, CPU)["verdict"]

    assert verdict() == "equal"
    honest = gpu_parts.additive_mask
    monkeypatch.setattr(gpu_parts, "additive_mask", lambda mask, dtype: honest(~mask, dtype))
    assert verdict() != "equal"
    monkeypatch.setattr(gpu_parts, "additive_mask", lambda mask, dtype: honest(mask, dtype) * torch.nan)
    assert verdict() == "not finite"


def test_a_gradient_that_is_nan_is_noticed(monkeypatch):
    """As cuDNN's at L=64: outputs fine, the gradient of q is not."""
    honest = torch.nn.functional.scaled_dot_product_attention

    def broken(q, *args, **options):
        q = q.clone()
        q.register_hook(lambda gradient: gradient * torch.nan)
        return honest(q, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
    cell = gpu_parts.sdpa_cell("math", "low scores", 64, torch.bfloat16, CPU)
    assert cell["verdict"] == "not finite"


def test_the_scores_of_the_reported_bug_are_low_enough():
    q, k, *_ = gpu_parts.attention_case("low scores", 64, torch.float32, CPU)
    scores = q @ k.transpose(-2, -1) / 32**0.5
    assert scores.max() < -88.7  # ln of the largest fp32, with the sign turned round


@pytest.mark.parametrize("slow", [False, True])
def test_bf16_that_is_slower_refutes_auto(slow, tmp_path, monkeypatch):
    times = dict(fp32=2.0, bf16=3.0 if slow else 1.0)

    def compare(steps, *_):
        assert list(steps) == ["manual, fp32", "manual, bf16", "sdpa, fp32", "sdpa, bf16"]
        return {name: dict(median_ms=times[name.partition(", ")[2]]) for name in steps}

    monkeypatch.setattr(gpu_parts, "compare", compare)
    (holds,) = gpu_parts.step(Setting(CPU, "bf16", True, tmp_path))["claims"].values()
    assert holds is not slow


def test_expected_peaks_and_tiles():
    def rows(**peaks):
        times = {"by hand": 3.0, "tiles": 4.0, "SDPA": 1.0}
        base = dict(length=1024, median_ms=None, out_of_memory=False) | {"pass": "forward"}
        return [base | dict(contender=n, median_ms=times[n], peak_bytes=peak) for n, peak in peaks.items()]

    good = gpu_parts.attention_claims(rows(**{"by hand": 712e6, "tiles": 1e6, "SDPA": 54e6}))
    assert len(good) == 3 and all(good.values())
    bad = gpu_parts.attention_claims(rows(**{"by hand": 500e6, "tiles": 1e6, "SDPA": None}))
    assert list(bad.values()) == [False, False, True]


def test_kernels_are_counted():
    x = torch.ones(3)
    assert gpu_parts.kernels_of(lambda: x + x, CPU)[0] == 1
    assert gpu_parts.kernels_of(lambda: (x + x).mul(x).sum(), CPU)[0] >= 3
    assert gpu_parts.kernels_of(lambda: None, CPU) is None


def test_tables_hold_what_was_found():
    epochs = [dict(token_acc=0.5, val_exact_match=n / 10, seconds=1.5) for n in range(1, 11)]
    output = "valid  1,000 drawn, 80 of them also in training: removed\non the first 500 ...: 0.998"
    run = dict(recipe="chapter", unseen=0.9979, history=epochs, output=output)
    runs = [run | dict(seed=seed) for seed in (0, 1)]
    row = dict(length=1024, contender="SDPA", median_ms=0.251, peak_bytes=53e6) | {"pass": "forward"}
    made = dict(device="RTX", precision="bf16", torch="2.13")
    results = dict(versions=made, recipes=dict(runs=runs), attention=dict(rows=[row]))
    text = gpu_table.report(results)
    for line in (
        "| forward | not measured | not measured | 0.25 ms | 2.97 ms | 0.25 ms |",
        "| peak memory | not measured | not measured | 53 MB | 712 MB | 79 MB |",
        "| | published (RTX 4090, bf16, PyTorch 2.7) | here, seeds 0, 1 (RTX, bf16, PyTorch 2.13) |",
        "| token accuracy, epoch 1 | 0.795 | 0.500, 0.500 |",
        "| exact match, epoch 5 | 0.964 | 0.500, 0.500 |",
        "| exact match, epoch 10 | 0.996 | 1.000, 1.000 |",
        "| the same, scored as the chapter does | 0.996 | 0.998, 0.998 |",
        "| exact match on 10,000 unseen strings | | 0.9979, 0.9979 |",
        "| time for 10 epochs | 17 s | 15 s, 15 s |",
    ):
        assert line in text.splitlines(), line
    assert "not measured" in gpu_table.report({})
