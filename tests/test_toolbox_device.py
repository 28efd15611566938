"""toolbox.device: where to compute and in which precision, on machines with and without a GPU."""

import pytest
import torch

import train
from toolbox.device import choose_device, choose_precision


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="--device cuda"):
        choose_device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, whose kernels run on the CPU; or they fail with gpu["error"]."""
    ones, faults = torch.ones, {}

    def on_the_gpu(*size, device=None):
        if "error" in faults and device == "cuda":
            raise faults["error"]
        return ones(*size)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", on_the_gpu)
    return faults


def test_cuda_where_there_is_one(gpu, capsys):
    assert [choose_device(name).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    assert capsys.readouterr().err == ""


OLD = "CUDA error: no kernel image is available for execution on the device\nCompile with ...\nAnd so on."


@pytest.mark.parametrize(
    "error, words",
    [
        (RuntimeError(OLD), "no kernel image is available"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), "out of memory"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_gpu_that_fails_at_its_first_kernel(gpu, error, words, capsys):
    gpu["error"] = error
    assert choose_device("auto") == torch.device("cpu") == choose_device("cpu")
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1  # by auto, once
    assert words in said.err and said.err.rstrip().endswith("computing on the CPU")
    with pytest.raises(ValueError, match=f"--device cuda: the GPU cannot be used .*{words}") as refused:
        choose_device("cuda")
    assert "\n" not in str(refused.value)


def test_a_kernel_that_fails_behind_pythons_back_is_waited_for(gpu, monkeypatch, capsys):
    """A GPU reports its error when something waits for it, not when the kernel is launched."""

    def late(tensor):
        raise RuntimeError(OLD)

    monkeypatch.setattr(torch.Tensor, "item", late)
    assert choose_device("auto").type == "cpu" and "no kernel image" in capsys.readouterr().err


def test_auto_goes_on_where_the_gpu_fails(gpu, tmp_path, capsys):
    """The whole of train.py, as with a GTX 10xx: no traceback, and a model of the CPU."""
    gpu["error"] = RuntimeError(OLD)
    options = ["--epochs", "1", "--samples", "64", "--batch-size", "32", "--out", str(tmp_path / "a.pt")]
    args, _ = train.parse_args(options)
    assert args.device.type == "cpu" and args.precision == "fp32"
    with pytest.raises(SystemExit) as ended:
        train.main([*options, "--device", "cuda"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and "no kernel image" in error and error.startswith("train.py: error: ")


@pytest.mark.parametrize("units", [True, False])
def test_precision_on_new_and_old_gpus(units, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: units)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_precision("auto", gpu)[0] == ("bf16" if units else "fp32")
    assert choose_precision("fp32", gpu)[0] == "fp32"
    assert [choose_precision(name, cpu)[0] for name in ("auto", "bf16")] == ["fp32", "bf16"]
    if units:
        assert choose_precision("bf16", gpu)[0] == "bf16"
    else:
        assert "no bf16" in choose_precision("auto", gpu)[1]
        with pytest.raises(ValueError, match="--precision bf16"):
            choose_precision("bf16", gpu)
