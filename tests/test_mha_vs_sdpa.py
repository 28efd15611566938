"""mha_vs_sdpa.py: the same numbers both ways, memory counted right, what is printed. No time is asserted."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import ROOT, STRICT, run_python

import mha_vs_sdpa
import toolbox.measure
from mha_vs_sdpa import by_hand, check_equal, main, make_attention, measure, through_sdpa, tiled_attention
from model import make_causal_mask, scaled_dot_product_attention
from toolbox.command_line import run_script
from toolbox.measure import peak_bytes

CPU = torch.device("cpu")
B, L, D, H = 2, 32, 16, 2
SMALL = "--batch 2 --d-model 16 --heads 2 --repeats 2 --warmup 1 --device cpu".split()


@pytest.fixture(autouse=True)
def quick():
    """One thread (small shapes gain nothing from more), and the global precision as it was."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def mha():
    return make_attention(D, H, CPU)


@pytest.fixture(params=["SDPA", "tiles"])
def other(request):
    """Each contender that is compared with attention by hand."""
    return mha_vs_sdpa.CONTENDERS[request.param]


def random_mask():
    """[B, H, L, L], asymmetric, in each row between 1 and L - 1 keys masked."""
    mask = torch.rand(B, H, L, L, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0], mask[..., 1] = False, True
    assert not (mask == mask.transpose(-2, -1)).all()
    return mask


def rows_of(capsys, argv):
    assert main([*SMALL, *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def one_line_error(capsys, argv):
    """The single line on stderr of a run that must end with code 2, with nothing on stdout."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err.startswith("mha_vs_sdpa.py: error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err


# ----------------------------------------------------------------------------------------------- same result


@pytest.mark.parametrize("precision, limit", [("fp32", 1e-4), ("bf16", 2e-2)])
def test_project_mask_reaches_sdpa_in_the_right_sense(mha, other, precision, limit):
    x, mask = torch.randn(B, L, D, generator=torch.Generator().manual_seed(2)), random_mask()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected, weights = mha(x, x, x, attn_mask=mask)
        output = other(mha, x, mask)
        wrong = other(mha, x, ~mask)
    assert weights.shape == (B, H, L, L)
    assert (output - expected).abs().max() < limit
    assert (wrong - expected).abs().max() > 5 * limit


@pytest.mark.parametrize("shape", [(B, 1, 1, L), (1, 1, L, L), (B, 1, L, L)])
def test_outputs_and_gradients_are_equal_for_every_mask_shape(mha, other, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[..., 0] = False
    x = torch.randn(B, L, D, requires_grad=True)
    cotangent = torch.randn(B, L, D)
    results = []
    for contender in (by_hand, other):
        y = contender(mha, x, mask)
        results.append([y, *torch.autograd.grad(y, [x, *mha.parameters()], cotangent)])
    assert len(results[0]) == 10  # output, input gradient, four weights and four biases
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_the_check_computes_without_tf32_and_the_rest_as_before(mha):
    seen = set()
    mha.W_o.register_forward_hook(lambda *_: seen.add(torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("high")
    check_equal(mha)
    assert seen == {"highest"} and torch.get_float32_matmul_precision() == "high"


def test_run_script_allows_tf32(process_as_before):
    torch.set_float32_matmul_precision("highest")
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: 5 if torch.get_float32_matmul_precision() == "high" else 1)
    assert ended.value.code == 5


def test_is_causal_equals_the_causal_mask(mha, other):
    x = torch.randn(B, L, D)
    expected = mha(x, x, x, attn_mask=make_causal_mask(L, CPU))[0]
    torch.testing.assert_close(other(mha, x), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(by_hand(mha, x), expected)
    assert (mha(x, x, x)[0] - expected).abs().max() > 1e-2  # causality does matter here


@pytest.mark.parametrize("tile", [1, 7, 16, 100])
@pytest.mark.parametrize("scores", [1.0, 300.0])
def test_tiles_of_any_size_equal_the_whole(tile, scores):
    torch.manual_seed(0)
    q, k, v = scores * torch.randn(B, H, L, 8), torch.randn(B, H, L, 8), torch.randn(B, H, L, 8)
    for mask, is_causal in [(None, False), (random_mask(), False), (make_causal_mask(L, CPU), True)]:
        expected, _ = scaled_dot_product_attention(q, k, v, mask)
        output = tiled_attention(q, k, v, None if is_causal else mask, is_causal, tile=tile)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


def test_tiles_above_the_diagonal_are_skipped_and_memory_grows_with_l_only():
    q = torch.randn(1, 2, 512, 8)
    peaks = [
        peak_bytes(partial(tiled_attention, x, x, x, is_causal=True, tile=16), CPU)
        for x in (q[:, :, :256].contiguous(), q)
    ]
    assert peaks[1] < 2.2 * peaks[0] and peaks[1] < 2 * 512 * 512 * 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        tiled_attention(q, q, q, is_causal=True, tile=128)
    products = {event.key: event.count for event in trace.key_averages()}["aten::matmul"]
    assert products == 2 * (1 + 2 + 3 + 4)  # q k and p v of each tile on or below the diagonal


def test_tiles_with_unequal_lengths():
    q, k, v = torch.randn(B, H, 5, 8), torch.randn(B, H, 9, 8), torch.randn(B, H, 9, 8)
    mask = torch.zeros(B, 1, 1, 9, dtype=torch.bool)
    mask[..., 7:] = True
    expected, _ = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(tiled_attention(q, k, v, mask), expected, atol=1e-5, rtol=0)
    for lengths in ((5, 9), (1, 5), (9, 5)):
        with pytest.raises(ValueError, match="one length"):
            tiled_attention(*(torch.randn(B, H, n, 8) for n in (*lengths, lengths[1])), is_causal=True)
    with pytest.raises(ValueError, match="no mask"):
        tiled_attention(q, q, q, make_causal_mask(5, CPU), is_causal=True)


def test_rows_with_every_key_masked_differ_as_the_comment_says(mha, other):
    torch.nn.init.eye_(mha.W_o.weight)
    x, mask = torch.randn(1, 4, D), torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 2, :] = True
    mean = (mha.W_v(x).mean(1) + mha.W_o.bias)[0]
    torch.testing.assert_close(by_hand(mha, x, mask)[0, 2], mean)
    expected = mha.W_o.bias if other is through_sdpa else mean
    torch.testing.assert_close(other(mha, x, mask)[0, 2], expected)


def uninverted(mha, x, mask=None):
    """The mistake the check is for: this project's mask goes to SDPA as it is."""
    return through_sdpa(mha, x, None if mask is None else ~mask)


def wrong_gradient(mha, x, mask=None):
    """Right outputs, but x gets no gradient."""
    return through_sdpa(mha, x.detach() + 0 * x, mask)


def not_a_number(mha, x, mask=None):
    return through_sdpa(mha, x, mask) * torch.nan


def long_is_wrong(mha, x, mask=None):
    """Right at the length of the equality check, wrong at the length that is timed."""
    return through_sdpa(mha, x, mask) + (x.size(1) != mha_vs_sdpa.CHECK_LENGTH)


@pytest.mark.parametrize(
    "broken, what",
    [(uninverted, "padding output"), (wrong_gradient, "causal gradients"), (not_a_number, "causal output"),
     (long_is_wrong, "timed output")],
)  # fmt: skip
def test_a_contender_that_is_not_equal_ends_the_run_untimed(monkeypatch, capsys, broken, what):
    timed = []
    monkeypatch.setattr(toolbox.measure, "milliseconds", lambda call, *_: timed.append(call) or 1.0)
    monkeypatch.setitem(mha_vs_sdpa.CONTENDERS, "SDPA", broken)
    assert main([*SMALL, "--length", "32"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("mha_vs_sdpa.py: error: SDPA") and err.count("\n") == 1
    assert what in err and "not timed" in err
    assert not timed and "median" not in out


# ---------------------------------------------------------------------------------------------------- memory


def test_peak_bytes_of_known_cases():
    def one_after_the_other():
        torch.empty(1000, 1000)
        torch.empty(1000, 1000)

    def both_at_once():
        x = torch.empty(1000, 1000)
        y = torch.empty(1000, 1000)
        del x, y
        torch.empty(10)

    assert peak_bytes(one_after_the_other, CPU) == 4_000_000
    assert peak_bytes(both_at_once, CPU) == 8_000_000
    assert peak_bytes(partial(torch.empty, 500, dtype=torch.float64), CPU) == 4_000
    trace = toolbox.measure.traced(lambda: torch.ones(1000) * 2)  # memory was not asked for
    assert trace.key_averages() and not any(event.self_cpu_memory_usage for event in trace.key_averages())


def test_peak_bytes_is_unknown_rather_than_zero_without_a_record():
    assert peak_bytes(lambda: None, CPU) is None


def test_changes_of_one_moment_stay_in_their_order(monkeypatch):
    """The trace may list moments in any order, but those of one clock tick happened as they stand there."""

    class Trace:
        def export_chrome_trace(self, path):
            changes = [(2, -300), (1, 200), (1, 100), (1, -100), (2, 50)]
            events = [dict(name="[memory]", ts=ts, args=dict(Bytes=size)) for ts, size in changes]
            Path(path).write_text(json.dumps(dict(traceEvents=events)), encoding="utf-8")

    monkeypatch.setattr(toolbox.measure, "traced", lambda call, memory: Trace())
    assert peak_bytes(lambda: None, CPU) == 300


def test_peak_memory_depends_neither_on_order_nor_on_company(mha, monkeypatch):
    x = torch.randn(B, 256, D, requires_grad=True)
    contenders = dict(mha_vs_sdpa.CONTENDERS)
    a, _, b = contenders

    def peaks(*names):
        monkeypatch.setattr(mha_vs_sdpa, "CONTENDERS", {name: contenders[name] for name in names})
        rows = measure(mha, x, 2, 1, "fp32")
        return {(row["contender"], row["pass"]): row["peak_bytes"] for row in rows}

    together, swapped, alone = peaks(a, b), peaks(b, a), peaks(a) | peaks(b)
    assert len(alone) == 4
    assert together == swapped == alone  # to the byte: gradients left over from another call would show
    assert x.grad is None and all(p.grad is None for p in mha.parameters())


def test_by_hand_holds_the_score_matrix_and_sdpa_does_not(capsys):
    rows = rows_of(capsys, ["--length", "512"])
    matrix = 2 * 2 * 512 * 512 * 4
    for row in rows["rows"]:
        held = row["peak_bytes"]
        assert held >= matrix if row["contender"] == "by hand" else 0 < held < matrix / 2, row


def test_memory_by_hand_grows_faster(capsys, tmp_path):
    rows = rows_of(capsys, ["--lengths", "64,512", "--out", str(tmp_path / "x.png")])["rows"]
    peak = {(r["contender"], r["pass"], r["length"]): r["peak_bytes"] for r in rows}
    for what in mha_vs_sdpa.PASSES:
        hand = peak["by hand", what, 512] / peak["by hand", what, 64]
        sdpa = peak["SDPA", what, 512] / peak["SDPA", what, 64]
        assert hand > 2 * sdpa


@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_passes_run_in_the_precision_and_leave_the_gradients_they_promise(mha, precision, dtype):
    for name in mha_vs_sdpa.CONTENDERS:
        x = torch.randn(B, L, D, requires_grad=True)
        mha.zero_grad(set_to_none=True)
        y = mha_vs_sdpa.forward(name, mha, x, precision)
        assert y.dtype == dtype and not y.requires_grad and x.grad is None
        mha_vs_sdpa.forward_backward(name, mha, x, precision)
        assert x.grad.abs().sum() > 0 and all(p.grad is not None for p in mha.parameters())


# ------------------------------------------------------------------------------------------- what is printed


def test_json_is_alone_on_stdout_and_its_ratios_are_quotients(capsys):
    assert main([*SMALL, "--length", "32", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert (document["batch"], document["d_model"], document["heads"]) == (2, 16, 2)
    assert document["precision"] == "fp32" and document["torch"] == torch.__version__
    off = document["equality"]["SDPA"]
    assert off["wrong sense"] > 1e-2 > 1e-4 > max(off["causal gradients"], off["padding gradients"]) >= 0
    rows = document["rows"]
    assert [(r["pass"], r["contender"]) for r in rows] == [
        ("forward", "by hand"),
        ("forward", "tiles"),
        ("forward", "SDPA"),
        ("forward + backward", "by hand"),
        ("forward + backward", "SDPA"),
    ]
    for base, row in zip([rows[0]] * 3 + [rows[3]] * 2, rows, strict=True):
        assert row["length"] == 32 and row["out_of_memory"] is False
        assert row["median_ms"] > 0 and row["iqr_ms"] >= 0 and row["peak_bytes"] > 0
        assert row["time_ratio"] == base["median_ms"] / row["median_ms"]
        assert row["memory_ratio"] == base["peak_bytes"] / row["peak_bytes"]


def test_table(capsys, monkeypatch):
    clock = iter(range(1, 1000))  # 1 ms, 2 ms, ...: medians known beforehand
    monkeypatch.setattr(toolbox.measure, "milliseconds", lambda call, *_: float(next(clock)))
    monkeypatch.setitem(mha_vs_sdpa.PASSES, "forward + backward", mha_vs_sdpa.forward)
    others = {name: kind for name, kind in mha_vs_sdpa.CONTENDERS.items() if name != "tiles"}
    monkeypatch.setattr(mha_vs_sdpa, "CONTENDERS", others)
    assert main([*SMALL, "--length", "32", "--repeats", "3"]) == 0
    out = capsys.readouterr().out
    # Calls 1 and 2 are the warm-up; then B A, A B, B A: by hand 4 5 8, SDPA 3 6 7.
    assert re.search(r"32  forward +by hand +5\.00 +2\.00 +1\.00 +\d+\.\d\d +1\.00\n", out)
    assert re.search(r"32  forward +SDPA +6\.00 +2\.00 +0\.83 +\d+\.\d\d +\d+\.\d\d\n", out)
    assert re.search(r"32  forward \+ backward +SDPA +14\.00", out)
    assert "with projections" in out and "wrong sense" in out and "B=2, d_model=16, h=2" in out


def test_contenders_take_turns_and_the_order_swaps():
    seen = []
    calls = {name: partial(seen.append, name) for name in "ABC"}
    times = toolbox.measure.take_turns(calls, lambda: None, repeats=2, warmup=1, device=CPU, label="")
    assert "".join(seen) == "ABC" + "CBA" + "ABC"
    assert {name: len(t) for name, t in times.items()} == dict(A=2, B=2, C=2)


@pytest.fixture
def fake_cuda(monkeypatch):
    """What a measurement asks of CUDA, in order, on a machine without it."""
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def elapsed_time(self, end):
            return 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("sync"))
    monkeypatch.setattr(toolbox.measure, "give_head_start", lambda device: done.append("head start"))
    return done


def test_a_gpu_is_timed_by_events_and_may_get_a_head_start(fake_cuda):
    gpu, call = torch.device("cuda"), lambda: fake_cuda.append("call")
    assert toolbox.measure.milliseconds(call, gpu) == 7.0
    assert fake_cuda == ["sync", "event", "call", "event", "sync"]
    fake_cuda.clear()
    toolbox.measure.milliseconds(call, gpu, head_start=True)  # not before the sync: it would be over by then
    assert fake_cuda == ["sync", "head start", "event", "call", "event", "sync"]


def test_attention_gets_the_head_start_and_a_training_step_does_not(mha, monkeypatch, fake_cuda):
    seen = []
    monkeypatch.setattr(toolbox.measure, "milliseconds", lambda *args: seen.append(args[2:]) or 1.0)
    measure(mha, torch.randn(B, L, D, requires_grad=True), 2, 1, "fp32")
    assert set(seen) == {(True,)}
    seen.clear()
    toolbox.measure.compare({"step": lambda: None}, 2, 1, CPU, "")
    assert set(seen) == {(False,)}


def test_the_head_start_covers_the_cache_and_is_given_back():
    toolbox.measure.give_head_start(torch.device("meta"))
    assert toolbox.measure.FILLS * 2**28 >= 2**32  # bytes: 1 ms at 4 TB/s


@pytest.mark.parametrize(
    "device, head_start, warm", [("cuda", True, 17), ("cuda", False, 3), ("cpu", True, 3)]
)
def test_a_gpu_is_warmed_up_by_time(fake_cuda, monkeypatch, device, head_start, warm):
    """By rounds of 0.03 s each until half a second has passed; otherwise by as many as asked for.

    benchmarks.joey has a batch for each call, and none to spare.
    """
    calls = []
    monkeypatch.setattr(toolbox.measure.time, "perf_counter", lambda: 0.03 * len(calls))
    times = toolbox.measure.take_turns(
        {"a": lambda: calls.append(1)}, lambda: None, 4, 3, torch.device(device), "", head_start
    )
    assert len(times["a"]) == 4 and len(calls) == warm + 4


def test_what_autocast_holds_by_hand_is_said_in_numbers():
    line = mha_vs_sdpa.autocast_memory(8, 8, 1024)
    assert "L=1024" in line and "(134 MB)" in line and line.count("(268 MB)") == 2 and "671 MB in all" in line


def test_the_kernel_named_is_one_that_ran(capsys):
    assert main([*SMALL, "--length", "32"]) == 0
    printed = re.search(r"kernel   SDPA ran (\S+)\n", capsys.readouterr().out).group(1)
    mha, x = make_attention(D, H, CPU), torch.randn(B, L, D)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        through_sdpa(mha, x)
    assert printed in {event.key for event in trace.key_averages()}
    # Another backend gives another name: it is looked up, not assumed.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert main([*SMALL, "--length", "32"]) == 0
    assert "ran aten::_scaled_dot_product_attention_math\n" in capsys.readouterr().out


def test_picture_and_growth(capsys, tmp_path):
    picture = tmp_path / "growth.png"
    assert main([*SMALL, "--lengths", "16,32,64", "--out", str(picture)]) == 0
    out = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and 20_000 < picture.stat().st_size < 500_000
    assert f"wrote {picture}" in out
    assert len(re.findall(r"^ +\d+  forward", out, re.M)) == 15
    assert len(re.findall(r"by hand +L 16 to 64: -?\d+\.\d\d\n", out)) == 4
    import matplotlib.image

    height, width, _ = matplotlib.image.imread(picture).shape
    assert (width, height) == (1500, 720)


def test_growth_is_the_power_of_l(capsys):
    rows = [
        {"contender": "c", "pass": "p", "length": n, "median_ms": 3.0 * n**2, "peak_bytes": 5 * n}
        for n in (8, 32)
    ]
    mha_vs_sdpa.print_growth(rows)
    out = capsys.readouterr().out
    assert "L 8 to 32: 2.00" in out and "L 8 to 32: 1.00" in out


# ---------------------------------------------------------------------------------------------- out of memory


def starved(contender, error):
    """The contender, but every call at a length other than the check's runs out of memory."""

    def starving(mha, x, mask=None):
        if x.size(1) != mha_vs_sdpa.CHECK_LENGTH:
            raise error
        return contender(mha, x, mask)

    return starving


@pytest.mark.parametrize(
    "name, error",
    [
        ("by hand", torch.OutOfMemoryError("CUDA out of memory")),
        ("SDPA", torch.OutOfMemoryError("CUDA out of memory")),
        (
            "by hand",
            RuntimeError("DefaultCPUAllocator: you tried to allocate 9 bytes"),
        ),
    ],
)
def test_out_of_memory_in_one_does_not_spoil_the_other(monkeypatch, capsys, tmp_path, name, error):
    monkeypatch.setitem(mha_vs_sdpa.CONTENDERS, name, starved(mha_vs_sdpa.CONTENDERS[name], error))
    rows = rows_of(capsys, ["--length", "32"])["rows"]
    for row in rows:
        assert row["out_of_memory"] is (row["contender"] == name)
        assert (row["median_ms"] is None) is (row["peak_bytes"] is None) is row["out_of_memory"]
        if row["out_of_memory"] or name == "by hand":
            assert row["time_ratio"] is None and row["memory_ratio"] is None  # never a made-up number
    assert main([*SMALL, "--lengths", "16,32", "--out", str(tmp_path / "x.png")]) == 0
    assert len(re.findall(rf"{name} +out of memory\n", capsys.readouterr().out)) == 4


def test_another_error_is_not_taken_for_lack_of_memory(monkeypatch):
    broken = starved(by_hand, RuntimeError("shapes do not fit"))
    monkeypatch.setitem(mha_vs_sdpa.CONTENDERS, "by hand", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        main([*SMALL, "--length", "32"])


def test_input_too_large_for_the_machine_is_one_line(capsys):
    argv = ["--batch", "65536", "--length", "131072", "--d-model", "1024", "--device", "cpu"]
    assert main(argv) == 1
    assert re.fullmatch(r"mha_vs_sdpa\.py: error: out of memory: [^\n]+\n", capsys.readouterr().err)


# ------------------------------------------------------------------------------------------------ user errors


@pytest.mark.parametrize(
    "argv, named",
    [
        (["--heads", "3"], ["--heads 3", "--d-model 512"]),
        (["--heads", "0"], ["--heads", "'0'", "at least 1"]),
        (["--d-model", "1"], ["--d-model", "'1'", "at least 2"]),
        (["--batch", "x"], ["--batch", "'x'"]),
        (["--repeats", "1"], ["--repeats", "at least 2"]),
        (["--warmup", "0"], ["--warmup", "at least 1"]),
        (["--length", "1" + "0" * 30], ["--length", "at most"]),
        (["--lengths", "256"], ["--lengths", "'256'", "256,512"]),
        (["--lengths", "256,"], ["--lengths", "'256,'"]),
        (["--lengths", "512,256"], ["--lengths", "growing"]),
        (["--lengths", "0,256"], ["--lengths", "'0,256'"]),
        (["--lengths", "a,b"], ["--lengths", "'a,b'"]),
        (["--lengths", "²,8"], ["--lengths", "'²,8'"]),
        (["--lengths", "8,16", "--length", "8"], ["--length", "--lengths"]),
        (["--lengths", "8,16", "--out", "no/such/folder/x.png"], ["--out no/such/folder/x.png", "folder"]),
        (["--lengths", "8,16", "--out", "x.bmp"], ["--out x.bmp", ".png"]),
        (["--lengths", "8,16", "--out", "x"], ["--out x", ".png"]),
        (["--out", "x.png"], ["--out x.png", "--lengths"]),
        (["--precision", "fp16"], ["--precision", "fp16", "bf16"]),
        (["--length-s", "8"], ["--length-s"]),
    ],
)
def test_user_error_is_one_line(capsys, argv, named):
    err = one_line_error(capsys, argv)
    assert all(word in err for word in named), err


def test_cuda_asked_for_and_absent(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cuda" in one_line_error(capsys, ["--device", "cuda"])


def test_without_cuda_it_says_so_and_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*SMALL[:-2], "--length", "32"]) == 0
    out = capsys.readouterr().out
    assert out.count("running on the CPU\n") == 1 and "fp32 (CPU)" in out


def test_matplotlib_missing_stops_before_measuring_and_only_when_needed(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # any import of it now fails
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in one_line_error(capsys, [*SMALL, "--lengths", "8,16"])
    assert main([*SMALL, "--length", "32"]) == 0


def test_picture_that_cannot_be_written_in_the_end(capsys, tmp_path, monkeypatch):
    def refuse(rows, title, path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(mha_vs_sdpa, "draw", refuse)
    assert main([*SMALL, "--lengths", "8,16", "--out", str(tmp_path / "x.png")]) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(r"mha_vs_sdpa\.py: error: --out [^\n]*Permission denied[^\n]*\n", err)
    assert "SDPA" in out  # the numbers are not lost


def test_runs_as_a_program_from_another_folder(tmp_path):
    options = [*SMALL, "--lengths", "16,32", "--json", "--out", "here.png"]
    done = run_python(*STRICT, ROOT / "mha_vs_sdpa.py", *options, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["rows"]) == 10
    assert [p.name for p in tmp_path.iterdir()] == ["here.png"]
