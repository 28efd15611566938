"""toolbox/checkpoint.py: what may be loaded, what goes back where; the GPU's part with faked calls."""

import pathlib

import pytest
import torch
from torch import nn

from toolbox import checkpoint as tc
from toolbox.checkpoint import (
    CheckpointError,
    load_plain,
    read_checkpoint,
    rebuild,
    restore,
    training_state,
    write_checkpoint,
)


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


def refusal(path, keys=("model", "run"), **bare):
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(path, keys, "train.py", **bare)
    return str(error.value)


def test_a_checkpoint_that_cannot_be_used_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    assert refusal(path) == f"{path}: no such checkpoint; run train.py first"
    assert refusal(tmp_path) == f"{tmp_path}: no such checkpoint; run train.py first"
    path.write_bytes(b"no archive")
    assert refusal(path) == f"{path}: not a checkpoint of train.py"
    write_checkpoint(path, {"model": {}, "other": 1})
    assert refusal(path) == f"{path}: not a checkpoint of train.py (no run)"
    assert refusal(path, ("a", "b", "other")) == f"{path}: not a checkpoint of train.py (no a, b)"
    write_checkpoint(path, {"model": 1, "run": 2})
    assert read_checkpoint(path, ("model", "run"), "train.py") == {"model": 1, "run": 2}

    def forbidden(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(tc, "load_plain", forbidden)
    assert refusal(path) == f"{path}: cannot be read (Permission denied)"


def test_a_bare_state_dict_is_taken_where_settings_are_given(tmp_path):
    path, settings = tmp_path / "a.pt", {"width": 3}
    weights = {"w": torch.arange(3.0)}
    write_checkpoint(path, weights)
    assert refusal(path, ("settings",)) == f"{path}: not a checkpoint of train.py (no settings)"
    found = read_checkpoint(path, ("settings", "model", "history"), "train.py", settings)
    assert found["settings"] == settings and found["history"] == [] and found["model"].keys() == {"w"}
    for other in ({}, {"w": torch.zeros(1), "n": 1}):
        write_checkpoint(path, other)
        assert "no settings" in refusal(path, ("settings",), bare=settings)


def test_a_damaged_archive_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"model": torch.full((50,), 7.0), "run": 1})
    whole = path.read_bytes()
    for damaged in (whole[:-30], whole.replace(torch.full((2,), 7.0).numpy().tobytes(), b"\0" * 8, 1)):
        path.write_bytes(damaged)
        assert refusal(path) == f"{path}: not a checkpoint of train.py"


def test_what_cannot_be_written_is_one_line_and_the_old_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"n": 1})
    with pytest.raises(CheckpointError) as error:
        write_checkpoint(tmp_path / "missing" / "a.pt", {})
    assert (
        str(error.value) == f"{tmp_path / 'missing' / 'a.pt'}: cannot be written (No such file or directory)"
    )

    def full(content, file):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos") from None  # as torch.save does when its stream fails

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError) as error:
        write_checkpoint(path, {"n": 2})
    assert str(error.value) == f"{path}: cannot be written (No space left on device)"
    assert read_checkpoint(path, ["n"], "train.py") == {"n": 1} and len(list(tmp_path.iterdir())) == 1

    def other(content, file):
        raise RuntimeError("something else")

    monkeypatch.setattr(torch, "save", other)
    with pytest.raises(CheckpointError, match="something else"):
        write_checkpoint(path, {"n": 2})


def test_a_rebuilt_model_is_in_eval_mode():
    weights = nn.Linear(2, 1).state_dict()
    model = rebuild(nn.Linear, {"settings": dict(in_features=2, out_features=1), "model": weights}, "a.pt")
    assert not model.training and torch.equal(model.weight, weights["weight"])
    with pytest.raises(CheckpointError, match="a.pt: does not fit this model.py"):
        rebuild(nn.Linear, {"settings": dict(depth=2), "model": weights}, "a.pt")


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
