"""toolbox/checkpoint.py: what may be loaded, what goes back where; the GPU's part with faked calls."""

import pathlib

import pytest
import torch
from torch import nn

from toolbox import checkpoint as tc
from toolbox.checkpoint import CheckpointError, load_plain, read_checkpoint, rebuild, restore, training_state


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_nothing_but_plain_values_and_tensors_is_loaded(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"settings": Harmful(tmp_path / "harm")}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of train.py"):
        read_checkpoint(path, ["settings"], "train.py")
    assert not (tmp_path / "harm").exists()


def test_a_gpus_checkpoint_loads_without_one(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"w": torch.arange(3)}, path)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert load_plain(path)["w"].tolist() == [0, 1, 2]


def trained(width=2):
    """A model, its optimiser and its scheduler, after one update."""
    model = nn.Linear(width, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def test_all_of_a_run_goes_back(tmp_path):
    state = training_state(*trained())
    drawn = torch.rand(3)
    others = trained()
    restore(state, tmp_path, *others)
    assert torch.equal(torch.rand(3), drawn)
    for name, now in zip(("model", "optimizer", "scheduler"), others, strict=True):
        assert str(now.state_dict()) == str(state[name])


def test_a_run_of_another_model_is_refused_in_one_line(tmp_path):
    state = training_state(*trained(width=3))
    with pytest.raises(CheckpointError) as error:
        restore(state, "a.pt", *trained())
    first = "Error(s) in loading state_dict for Linear:"
    assert str(error.value) == f"a.pt: not of this model ({first})"
    with pytest.raises(CheckpointError) as error:
        rebuild(nn.Linear, {"settings": dict(in_features=2, out_features=1), "model": state["model"]}, "b.pt")
    assert str(error.value) == f"b.pt: does not fit this model.py ({first})"


class OnGpu(nn.Linear):
    """A model whose parameters say that they are on the second GPU."""

    class Parameter:
        device = torch.device("cuda", 1)

    def parameters(self, recurse=True):
        return iter([self.Parameter()])


def test_the_gpus_random_state_is_kept_and_put_back(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: calls.append(("get", device)) or "state")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: calls.append((state, device)))
    _, optimizer, scheduler = trained()
    model = OnGpu(2, 1)
    state = training_state(model, optimizer, scheduler)
    assert state["rng"]["cuda"] == "state" and calls == [("get", torch.device("cuda", 1))]
    restore(state, tmp_path, model, optimizer, scheduler)
    assert calls[1:] == [("state", torch.device("cuda", 1))]
    state["rng"]["cuda"] = None  # made on the CPU
    restore(state, tmp_path, model, optimizer, scheduler)
    assert len(calls) == 2
    assert tc.random_state(torch.device("cpu"))["cuda"] is None and len(calls) == 2
    state["rng"]["cuda"] = "of a GPU"  # and now on the CPU
    restore(state, tmp_path, *trained())
    assert len(calls) == 2
