"""translation/distributed.py: two processes under torchrun make the updates of one with the same batches."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("sentencepiece")
pytest.importorskip("sacrebleu")

from processes import ROOT
from translation_runs import TINY, no_tensorboard, read  # noqa: F401  (the fixture acts on its own)

import toolbox.device
import translation.train as tt
from translation.data import TransformerBatchSampler
from translation.distributed import own_device

# Some gradients are longer than --clip and some are not: Adam alone would not notice a wrong factor in all.
QUIET = [*TINY, "--dropout", "0", "--seed", "3", "--save-every", "0", "--clip", "0.4"]


def torchrun(out, *options, status=0, processes=2):
    """The unchanged script in two CPU processes, as a user would start it."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    command += ["-m", "translation.train", "--out", str(out), *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})  # fmt: skip
    assert (done.returncode == 0) == (status == 0), done.stdout + done.stderr
    return done


class Joined(TransformerBatchSampler):
    """One process's batches: those that two processes would have at the same time, laid together."""

    def __init__(self, *args, seed, rank, world_size):
        super().__init__(*args, seed=seed, world_size=2)

    def __iter__(self):
        return iter([a + b for a, b in zip(self._batches[::2], self._batches[1::2], strict=True)])


def test_too_few_gpus_are_noticed_in_every_process(monkeypatch):
    """Rank 0, which speaks for all, must not go on to wait for those that have no GPU."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(toolbox.device, "cuda_trouble", lambda: "" if chosen[-1:] == [1] else "the wrong GPU")
    for name, value in dict(RANK=0, WORLD_SIZE=4, MASTER_ADDR="x", MASTER_PORT=1, LOCAL_WORLD_SIZE=4).items():
        monkeypatch.setenv(name, str(value))
    for local in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert own_device("cpu") == torch.device("cpu")
        with pytest.raises(ValueError, match="--nproc-per-node: every process needs a GPU.* has 2"):
            own_device("auto")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device("cuda") == own_device("auto") == torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_process_whose_gpu_fails_does_not_go_to_the_cpu_alone(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(toolbox.device, "cuda_trouble", lambda: "no kernel image")
    torchrun_variables = dict(RANK=1, LOCAL_RANK=1, WORLD_SIZE=2, MASTER_ADDR="x", MASTER_PORT=1)
    for variable, value in torchrun_variables.items():
        monkeypatch.setenv(variable, str(value))
    with pytest.raises(ValueError, match="no kernel image"):
        own_device(name)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    out = tmp_path_factory.mktemp("two") / "run"
    return out, torchrun(out, *QUIET, "--epochs", 3)


def test_two_processes_make_the_updates_of_one(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("translation.run.TransformerBatchSampler", Joined)
    assert tt.main([*QUIET, "--epochs", "3", "--out", str(tmp_path / "one")]) == 0
    one, two = read(tmp_path / "one" / "last.pt"), read(pair[0] / "last.pt")
    assert one["scheduler"]["last_epoch"] == two["scheduler"]["last_epoch"] >= 6
    for name, value in one["model"].items():
        if not name.endswith("W_k.bias"):  # no output depends on it: Adam scales its rounding up
            assert torch.allclose(value, two["model"][name], rtol=0, atol=1e-5), name
    for ours, theirs in zip(one["history"], two["history"], strict=True):
        for key in ("train_loss", "val_loss"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-5)


def test_only_the_first_process_prints_and_writes(pair):
    out, done = pair
    for text in ("device ", "epoch  1 ", "wrote "):
        assert sum(line.startswith(text) for line in done.stdout.splitlines()) == 1, done.stdout
    assert "2 processes" in done.stdout and not list(out.glob("*.tmp"))
    assert len(read(out / "last.pt")["rng"]) == 2


@pytest.mark.slow
def test_two_processes_resume_in_mid_epoch_to_the_bit(tmp_path):
    """Dropout is on, so both processes' random state must come back. Both die in their eighth update."""
    options = [*TINY, "--dropout", "0.2", "--max-tokens", "200", "--epochs", "2", "--save-every", "3"]
    torchrun(tmp_path / "straight", *options)
    straight = read(tmp_path / "straight" / "last.pt")

    script = (
        "import sys, translation.train as tt\n"
        "step, count = tt.train_step, 0\n"
        "def stopping(*args):\n"
        "    global count\n"
        "    count += 1\n"
        "    if count == 8: sys.exit(5)\n"
        "    return step(*args)\n"
        "tt.train_step = stopping\n"
        "sys.exit(tt.main())\n"
    )
    (tmp_path / "dying.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "dying.py"), "--out", str(tmp_path / "cut"), *options]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, cwd=ROOT, capture_output=True, env=env, timeout=240).returncode != 0
    cut = read(tmp_path / "cut" / "last.pt")
    assert 0 < cut["position"] == 6 and cut["epoch"] == 0
    torchrun(tmp_path / "cut", "--resume", "--device", "cpu")
    resumed = read(tmp_path / "cut" / "last.pt")
    for name, value in straight["model"].items():
        assert torch.equal(value, resumed["model"][name]), name
    assert [row["train_loss"] for row in straight["history"]] == [r["train_loss"] for r in resumed["history"]]


def test_a_run_of_two_does_not_go_on_with_one(pair, capsys):
    with pytest.raises(SystemExit) as end:
        tt.main(["--resume", "--device", "cpu", "--out", str(pair[0])])
    assert end.value.code == 2 and "made by 2 processes" in capsys.readouterr().err
