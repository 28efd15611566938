"""toolbox.device: where to compute and in which precision, on machines with and without a GPU."""

import pytest
import torch

from toolbox.device import choose_device, choose_precision


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="--device cuda"):
        choose_device("cuda")


def test_cuda_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [choose_device(name).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


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
