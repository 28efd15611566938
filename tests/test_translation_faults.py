"""translation/: killed, told to end, alone of two, and on a full disk, at every moment."""

import importlib.util
import math
import os
import random
import shutil
import socket
import time

import pytest
import torch
from faults import TRANSLATION, Disk, fill, full, kill, pause, run, same, shrink, start

pytest.importorskip("sentencepiece", reason="pip install -r translation/requirements.txt")
pytest.importorskip("tqdm", reason="pip install -r translation/requirements.txt")

import test_translation_prepare

import translation.train as tt
from model import Transformer
from toolbox.checkpoint import CheckpointError
from translation import prepare
from translation.bleu import corpus_bleu
from translation.checkpoint import average, load_translator
from translation.data import LangPairDataset, Tokenizer, TransformerBatchSampler, collate
from translation.decode import beam_search, translate_lines
from translation.options import last_checkpoint
from translation.run import Run, best_row

NAME = "translation.train"
server = test_translation_prepare.server  # a fixture
STAGES = (2, 4)  # epochs: a run that is finished goes on
SEED = 20  # of the moments
FILES = {"last.pt", "best.pt", "tokenizer.model", "train.ids", "val.ids", "log.txt"}


class Straight(dict):
    """(name, epoch, position) -> the file's content, in a run that nothing disturbs.

    left: epochs -> the names in its folder after that stage.
    """


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    saved, out, write = Straight(), tmp_path_factory.mktemp("straight") / "run", Run.write_weights
    saved.left = {}

    def writing(run, name, more=None):
        write(run, name, more)
        saved[name, run.epoch, run.position] = torch.load(run.args.out / name, weights_only=True)

    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, NAME)
        patch.setattr(Run, "write_weights", writing)
        for epochs in STAGES:
            assert tt.main(list(map(str, command(out, epochs)))) == 0
            saved.left[epochs] = set(os.listdir(out))
    assert any(name == "last.pt" and epoch == 3 and position for name, epoch, position in saved)
    assert ("averaged.pt", 4, 0) in saved
    return saved


def command(out, epochs):
    if not (out / "last.pt").exists():
        return [*TRANSLATION, "--out", out, "--epochs", epochs]
    return ["--resume", "--device", "cpu", "--out", out, "--epochs", epochs]


def check(out, straight):
    """What is there belongs to the undisturbed run as far as it has come -> epoch and position of last.pt."""
    if not (out / "last.pt").exists():
        assert not any(out.glob("*.pt"))
        return -1, 0
    last = last_checkpoint(out)
    place = last["epoch"], last["position"]
    for path in out.glob("*.pt"):
        found = torch.load(path, weights_only=True)
        where = place if path.name == "last.pt" else (found["epoch"], 0)
        same(found, straight[(path.name, *where)], path.name)
        # An epoch's own files come before last.pt says that it is over.
        assert found["epoch"] <= last["epoch"] + 1
    if (out / "averaged.pt").exists():
        assert place[1] == 0 and torch.load(out / "averaged.pt", weights_only=True)["epoch"] == place[0]
    if place[0]:
        best = torch.load(out / "best.pt", weights_only=True)
        assert best["epoch"] in (best_row(last["history"])["epoch"], last["epoch"] + 1)
        load_translator(out)
    return place


def check_finished(out, straight, epochs):
    assert check(out, straight) == (epochs, 0)
    assert set(os.listdir(out)) == straight.left[epochs] >= FILES | {"averaged.pt"}


def moments(count):
    """`count` here, ten times as many among the slow tests."""
    return pytest.mark.parametrize("count", [count, pytest.param(10 * count, marks=pytest.mark.slow)])


@pytest.fixture
def out(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "run"


def disturb(out, straight, count, stop, after):
    """Stop a run at `count` random moments, go on each time; after(process, said): what must be true then."""
    log, disk, chance = out.parent.parent / "log", (out.parent, pause, 0.01), random.Random(SEED)
    for _ in range(2):  # the first child of all waits for much to be imported
        begin = time.perf_counter()
        assert run(NAME, command(out, 2), log, disk) == 0, log.read_text()
        shutil.rmtree(out)
    longest, landed, delays, stages = time.perf_counter() - begin, 0, [], list(STAGES)
    try:
        while landed < count or stages != [4]:
            process = start(NAME, command(out, stages[0]), log, disk)
            delays.append(chance.uniform(0.1, longest))
            process.join(delays[-1])
            stop(process)
            process.join(60)
            if process.exitcode:
                landed += after(process, log.read_text())
            else:
                check_finished(out, straight, stages.pop(0))
                if not stages:
                    stages = list(STAGES)
                    shutil.rmtree(out)
        assert run(NAME, command(out, 4), log, disk) == 0
        check_finished(out, straight, 4)
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
        while_saving += any(out.glob("*.unfinished"))
        return True

    disturb(out, straight, count, lambda process: process.kill(), after)
    assert count < 50 or while_saving >= 5


@pytest.mark.parametrize("step", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step_of_saving(out, straight, step):
    """The second stage, which begins with the files of a finished run."""
    log, finished = out.parent.parent / "log", out.parent / "finished"
    assert run(NAME, command(finished, 2), log) == 0
    number, while_saving = 1, 0
    while True:
        shutil.copytree(finished, out)
        status = run(NAME, command(out, 4), log, (out.parent, kill, number))
        if status == 0:
            break
        assert status == -9, log.read_text()
        check(out, straight)
        while_saving += any(out.glob("*.unfinished"))
        assert run(NAME, command(out, 4), log) == 0, log.read_text()
        check_finished(out, straight, 4)
        shutil.rmtree(out)
        number += step
    check_finished(out, straight, 4)
    assert while_saving >= number // step // 4 > 0


# -------------------------------------------------------------------------------------------- told to end


@moments(5)
def test_sigterm_at_random_moments(out, straight, count):
    def after(process, said):
        assert "Traceback" not in said
        assert not list(out.parent.rglob("*.unfinished")) and not list(out.parent.rglob("lock"))
        if process.exitcode == -15:  # before the script had begun
            return False
        assert process.exitcode == 130 and "interrupted" in said, said
        return True

    disturb(out, straight, count, lambda process: process.terminate(), after)


# ------------------------------------------------------------------------------------------- the full disk


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_training_on_a_full_disk(out, straight, monkeypatch, capsys, step):
    shrink(monkeypatch, NAME)

    def main():
        return tt.main(list(map(str, command(out, 2))))

    def after(status):
        check(out, straight)
        assert not list(out.parent.rglob("*.unfinished")) and not list(out.parent.rglob("lock"))
        assert main() == 0
        check_finished(out, straight, 2)
        shutil.rmtree(out)

    fill(out.parent, main, after, capsys, step)


@pytest.mark.parametrize("lasting", [True, False])
def test_curves_that_cannot_be_written_end_no_run(out, straight, monkeypatch, capfd, lasting):
    pytest.importorskip("tensorboard")
    if importlib.util.find_spec("tensorflow"):
        pytest.skip("tensorboard writes through tensorflow, past Python's open")
    number, noted = 1, 0
    monkeypatch.setattr("translation.curves.LOG_EVERY", 5)
    while True:
        capfd.readouterr()
        with Disk(out / "tensorboard", full(number, lasting), removing=False) as disk:
            assert tt.main(list(map(str, command(out, 2)))) == 0
        said = capfd.readouterr()
        check(out, straight)
        assert "Traceback" not in said.err and said.err.count("\n") <= 1
        noted += "tensorboard cannot be written (No space left on device)" in said.err + said.out
        if disk.count < number:
            break
        shutil.rmtree(out)
        number += 3
    assert number > 6 and noted >= number // 6
    assert any((out / "tensorboard").iterdir())


# ------------------------------------------------------------------------------------------- two processes


def two(out, epochs, disk=None):
    """Both processes of a run, as torchrun would start them, and what they say; disk: of the first one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [out.parent.parent / f"log{rank}" for rank in range(2)]
    shared = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    slow = (out.parent, pause, 0.01)
    processes = [
        start(NAME, command(out, epochs), logs[rank], own, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank, own in enumerate([disk or slow, slow])
    ]
    return processes, logs


def join(processes, seconds):
    """Wait -> the exit codes; None for one that hangs, and is killed here."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


@pytest.fixture(scope="module")
def straight_two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two") / "folder" / "run"
    out.parent.mkdir()
    assert join(two(out, 4)[0], 120) == [0, 0]
    return last_of_two(out)


def last_of_two(out):
    return torch.load(out / "last.pt", weights_only=True)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 0.13])
def test_one_of_two_is_killed(out, straight_two, victim, delay):
    processes, logs = two(out, 4)
    end = time.monotonic() + 60
    while not (logs[0].exists() and "epoch  1" in logs[0].read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(delay)
    processes[victim].kill()
    codes = join(processes, 60)
    assert codes[victim] == -9 and codes[1 - victim] == 2, codes
    said = logs[1 - victim].read_text()
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if "error: " in line]
    assert len(lines) == 1 and f"torchrun: process {1 - victim} had to end" in lines[0], said
    assert last_of_two(out)["epoch"] >= 1
    assert join(two(out, 4)[0], 120) == [0, 0], [log.read_text() for log in logs]
    same(last_of_two(out), straight_two)
    assert not list(out.glob("*.unfinished")) and not (out / "lock").exists()


@pytest.mark.parametrize("number", [1, 20, 60])
def test_the_first_of_two_finds_the_disk_full(out, straight_two, number):
    processes, logs = two(out, 4, (out.parent, full, number, True))
    codes, said = join(processes, 60), [log.read_text() for log in logs]
    assert codes == [2, 2] and "Traceback" not in "".join(said)
    errors = [[line for line in text.splitlines() if "error: " in line] for text in said]
    assert len(errors[0]) == 1 and "No space left on device" in errors[0][0], said
    assert len(errors[1]) == 1 and "torchrun: process 1 had to end" in errors[1][0], said
    assert not list(out.parent.rglob("*.unfinished"))
    assert join(two(out, 4)[0], 120) == [0, 0], [log.read_text() for log in logs]
    same(last_of_two(out), straight_two)


# ------------------------------------------------------------------------------------ the other commands


def test_prepare_on_a_full_disk(server, tmp_path, capsys):
    folder, contents = tmp_path / "data", test_translation_prepare.FILES

    def main():
        return prepare.main(["--data", str(folder), "--vocab-size", "300"])

    def after(status):
        assert all(path.read_bytes() == contents[path.name] for path in folder.glob("*"))
        assert main() == 0 and set(os.listdir(folder)) == contents.keys()
        shutil.rmtree(folder)

    assert fill(tmp_path, main, after, capsys, step=3) == 0


@pytest.mark.parametrize("name", ["translate", "evaluate", "attention"])
def test_output_on_a_full_disk(out, straight, monkeypatch, tmp_path, capsys, name):
    if name == "evaluate":
        pytest.importorskip("sacrebleu")
    shrink(monkeypatch, NAME)
    assert tt.main(list(map(str, command(out, 1)))) == 0
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "a.txt").write_text("old\n")
    (tmp_path / "in.txt").write_text("Ein Hund.\n")
    options = {
        "translate": ["--input", tmp_path / "in.txt", "--output", folder / "a.txt"],
        "evaluate": ["--sample", "--split", "test", "--out", folder / "a.txt"],
        "attention": ["--out", folder / "a.png", "Ein Hund."],
    }[name]
    script = importlib.import_module(f"translation.{name}")

    def main():
        return script.main(list(map(str, ["--checkpoint", out, "--device", "cpu", "--beam", "1", *options])))

    def after(status):
        if status:
            assert (folder / "a.txt").read_text() == "old\n" and len(list(folder.iterdir())) == 1
        (folder / "a.txt").write_text("old\n")
        (folder / "a.png").unlink(missing_ok=True)

    assert fill(folder, main, after, capsys) == 0


# ------------------------------------------------------------------- shapes and types without an answer


@pytest.fixture(scope="module")
def translator():
    tokenizer = Tokenizer.train(["Ein Hund rennt.", "A dog runs."] * 5, 300)
    sizes = dict(d_model=16, num_heads=2, dff=16, num_layers=1, max_len=20)
    return Transformer(tokenizer.vocab_size, tokenizer.vocab_size, **sizes).eval(), tokenizer


LOGITS, LABELS, IDS = torch.rand(2, 6, 13), torch.ones(2, 6, dtype=torch.long), torch.tensor([[1, 265, 2]])
PAIRS = [([5], [6])]
NO_ANSWER = {
    "lines: one string, tokeniser": (lambda m, t: Tokenizer.train("Ein Hund", 300), "single string"),
    "lines: one string, dataset": (lambda m, t: LangPairDataset("ab", "cd", t), "single string"),
    "lines: one string, decoding": (lambda m, t: translate_lines(m, t, "Ein"), "single string"),
    "lines: one string, greedy": (lambda m, t: tt.greedy_translate(m, t, "Ein"), "single string"),
    "lines: one string, BLEU": (lambda m, t: corpus_bleu("abc", "abd"), "single string"),
    "lines: unequal, BLEU": (lambda m, t: corpus_bleu(["a"], ["a", "b"]), "equally many"),
    "lines: unequal": (lambda m, t: LangPairDataset(["a"], ["a", "b"], t), "equally many"),
    "batches of -1": (lambda m, t: translate_lines(m, t, ["Ein"], batch_size=-1), "batch_size=-1"),
    "batches of 0": (lambda m, t: translate_lines(m, t, ["Ein"], batch_size=0), "batch_size=0"),
    "collate: fractions": (lambda m, t: collate([([5.7], [6])]), "must be integers"),
    "collate: nothing": (lambda m, t: collate([]), "no sentence pairs"),
    "sampler: nothing": (lambda m, t: TransformerBatchSampler([]), "no sentence pairs"),
    "sampler: three lengths": (lambda m, t: TransformerBatchSampler([(1, 2, 3)]), "unpack"),
    "ids: fractions": (lambda m, t: t.decode([265.7]), "integer"),
    "pieces: fractions": (lambda m, t: t.pieces(torch.tensor([3.5])), "integer"),
    "ids: negative": (lambda m, t: t.decode([-1]), "range"),
    "ids: beyond the vocabulary": (lambda m, t: t.decode([9999]), "range"),
    "ids: a batch": (lambda m, t: t.decode(torch.ones(2, 3).long()), "integer"),
    "beam: float ids": (lambda m, t: beam_search(m, IDS.float()), "indices"),
    "beam: no token": (lambda m, t: beam_search(m, IDS[:, :0]), "no tokens"),
    "beam: one row without a batch": (lambda m, t: beam_search(m, IDS[0]), "ndex|range"),
    "beam: alpha NaN": (lambda m, t: beam_search(m, IDS, alpha=math.nan), "alpha=nan"),
    "beam: alpha infinite": (lambda m, t: beam_search(m, IDS, alpha=math.inf), "alpha=inf"),
    "beam: two limits for one row": (lambda m, t: beam_search(m, IDS, max_len=torch.tensor([3, 4])), "size"),
    "beam: half a token": (lambda m, t: beam_search(m, IDS, max_len=3.5), "max_len=3.5"),
    "loss: labels transposed": (lambda m, t: tt.loss_sum(LOGITS, LABELS.T), "do not score"),
    "loss: another batch": (lambda m, t: tt.loss_sum(LOGITS, LABELS[:1]), "do not score"),
    "loss: float labels": (lambda m, t: tt.loss_sum(LOGITS, LABELS.float()), "Long"),
    "average: nothing": (lambda m, t: average([]), "no checkpoints"),
}


@pytest.mark.parametrize("what", NO_ANSWER)
def test_what_has_no_answer_gets_none(translator, what):
    if "BLEU" in what:
        pytest.importorskip("sacrebleu")
    call, words = NO_ANSWER[what]
    with pytest.raises((ValueError, TypeError, RuntimeError, IndexError), match=words):
        call(*translator)


def test_only_checkpoints_of_one_model_are_averaged(tmp_path):
    tokenizer = torch.zeros(1, dtype=torch.uint8)
    one, three = torch.ones(1), torch.ones(3)
    models = {"a": dict(w=three), "b": dict(w=one), "c": dict(w=three, v=one)}
    for name, model in models.items():
        torch.save(dict(settings={}, model=model, tokenizer=tokenizer), tmp_path / name)
    assert average([tmp_path / "a", tmp_path / "a"])["w"].tolist() == [1, 1, 1]
    for other in "bc":
        with pytest.raises(CheckpointError, match=f"{other}: not of the same model"):
            average([tmp_path / "a", tmp_path / other])


def test_an_empty_batch_has_an_empty_answer(translator):
    assert beam_search(translator[0], IDS[:0]) == [] and translate_lines(*translator, []) == []
