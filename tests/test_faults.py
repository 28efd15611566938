"""train.py, viz.py and mha_vs_sdpa.py: killed, told to end, and on a full disk, at every moment."""

import os
import random
import time

import pytest
from faults import TRAIN, Disk, full, kill, pause, run, same, shrink, start

import train

EPOCHS = 3
OPTIONS = [*TRAIN, "--epochs", EPOCHS]
SEED = 20  # of the moments


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """epoch -> the checkpoint after it, in a run that nothing disturbs."""
    saved, out = {}, tmp_path_factory.mktemp("straight") / "a.pt"
    save = train.save_checkpoint
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, "train")

        def saving(path, *state):
            save(path, *state)
            checkpoint = train.load_checkpoint(path)
            saved[checkpoint["epoch"]] = checkpoint

        patch.setattr(train, "save_checkpoint", saving)
        assert train.main([*map(str, OPTIONS), "--out", str(out)]) == 0
    assert list(saved) == list(range(EPOCHS + 1))
    return saved


def command(out):
    return [*OPTIONS, "--out", out, *(["--resume"] if out.exists() else [])]


def check(out, straight):
    """What is there belongs to the undisturbed run -> how many epochs of it; -1: nothing is there."""
    if not out.exists():
        return -1
    checkpoint = train.load_checkpoint(out)
    same(checkpoint, straight[checkpoint["epoch"]])
    train.load_model(out)
    return checkpoint["epoch"]


def check_finished(out, straight):
    assert check(out, straight) == EPOCHS
    assert os.listdir(out.parent) == [out.name]


def moments(count):
    """`count` here, ten times as many among the slow tests."""
    return pytest.mark.parametrize("count", [count, pytest.param(10 * count, marks=pytest.mark.slow)])


@pytest.fixture
def out(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "a.pt"


def duration(out, log, disk):
    """Seconds that an undisturbed run takes; the first child of all waits for much to be imported."""
    for _ in range(2):
        begin = time.perf_counter()
        assert run("train", command(out), log, disk) == 0
        out.unlink()
    return time.perf_counter() - begin


def disturb(out, count, stop, after):
    """Stop a run at `count` random moments, go on each time; after(process): what must be true then."""
    log, disk, chance = out.parent.parent / "log", (out.parent, pause, 0.02), random.Random(SEED)
    longest, landed, delays = duration(out, log, disk), 0, []
    try:
        while landed < count:
            process = start("train", command(out), log, disk)
            delays.append(chance.uniform(0.1, longest))
            process.join(delays[-1])
            if process.exitcode is None:
                stop(process)
                process.join(60)
                landed += after(process, log.read_text())
            else:
                assert process.exitcode == 0, log.read_text()
                out.unlink()
        assert run("train", command(out), log, disk) == 0
    except BaseException:
        print(f"random.Random({SEED}), delays in seconds: {delays}\n{log.read_text()}")
        raise


# ---------------------------------------------------------------------------------------------- killed


@moments(5)
def test_killed_at_random_moments(out, straight, count):
    while_saving = 0

    def after(process, said):
        nonlocal while_saving
        assert process.exitcode == -9
        check(out, straight)
        while_saving += any(out.parent.glob("*.unfinished"))
        return True

    disturb(out, count, lambda process: process.kill(), after)
    check_finished(out, straight)
    assert count < 50 or while_saving >= 5


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step_of_saving(out, straight, step):
    number, while_saving, log = 1, 0, out.parent.parent / "log"
    while True:
        status = run("train", command(out), log, (out.parent, kill, number))
        if status == 0:
            break
        assert status == -9, log.read_text()
        check(out, straight)
        while_saving += any(out.parent.glob("*.unfinished"))
        assert run("train", command(out), log) == 0
        check_finished(out, straight)
        out.unlink()
        number += step
    check_finished(out, straight)
    assert while_saving >= number // step // 2 > 2


# -------------------------------------------------------------------------------------------- told to end


@moments(5)
def test_sigterm_at_random_moments(out, straight, count):
    def after(process, said):
        epoch = check(out, straight)
        if process.exitcode == -15:  # before the script had begun
            assert said == "" and epoch == -1
            return False
        if process.exitcode == 0:  # a moment too late
            return False
        assert process.exitcode == 130 and "interrupted" in said and "Traceback" not in said, said
        assert set(os.listdir(out.parent)) <= {out.name}
        return True

    disturb(out, count, lambda process: process.terminate(), after)
    check_finished(out, straight)


# ------------------------------------------------------------------------------------------- the full disk


def fill(folder, main, after, capsys, step):
    """Run main() on a disk that is full from its n-th change on, or at that one only, for all n.

    after(): what must be true when it failed. -> how many of the runs went well all the same.
    """
    survived = 0
    for lasting in (True, False):
        number = 1
        while True:
            capsys.readouterr()
            with Disk(folder, full(number, lasting)) as disk:
                try:
                    status = main()
                except SystemExit as ended:
                    status = ended.code
            if disk.count < number:
                break
            said = capsys.readouterr().err
            if status == 0:
                survived += 1
            else:
                assert status == 2 and said.count("\n") == 1 and "No space left" in said, (number, said)
                assert "error: " in said
            after(status)
            number += step
        assert status == 0 and number > 2
    return survived


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_training_on_a_full_disk(out, straight, monkeypatch, capsys, step):
    shrink(monkeypatch, "train")

    def main():
        return train.main([*map(str, command(out))])

    def after(status):
        check(out, straight)
        assert set(os.listdir(out.parent)) <= {out.name}
        assert main() == 0
        check_finished(out, straight)
        out.unlink()

    fill(out.parent, main, after, capsys, step)
