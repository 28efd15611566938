"""train.py, viz.py and mha_vs_sdpa.py: killed, told to end, and on a full disk, at every moment."""

import os
import random
import time

import pytest
import torch
from faults import TRAIN, Disk, fill, full, kill, limit, pause, run, same, shrink, start, tiny_disk

import train
import viz
from mha_vs_sdpa import tiled_attention as tiled
from model import KVCache, Transformer, fused_attention, scaled_dot_product_attention

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


def disturb(out, straight, count, stop, after):
    """Stop a run at `count` random moments, go on each time; after(process): what must be true then."""
    log, disk, chance = out.parent.parent / "log", (out.parent, pause, 0.02), random.Random(SEED)
    longest, landed, delays = duration(out, log, disk), 0, []
    try:
        while landed < count:
            process = start("train", command(out), log, disk)
            delays.append(chance.uniform(0.1, longest))
            process.join(delays[-1])
            stop(process)
            process.join(60)
            if process.exitcode:
                landed += after(process, log.read_text())
            else:
                check_finished(out, straight)
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

    disturb(out, straight, count, lambda process: process.kill(), after)
    check_finished(out, straight)
    assert count < 50 or while_saving >= 5


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
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
    assert while_saving >= number // step // 2 > 1


# -------------------------------------------------------------------------------------------- told to end


@moments(5)
def test_sigterm_at_random_moments(out, straight, count):
    def after(process, said):
        epoch = check(out, straight)
        if process.exitcode == -15:  # before the script had begun
            assert said == "" and epoch == -1
            return False
        assert process.exitcode == 130 and "interrupted" in said and "Traceback" not in said, said
        assert set(os.listdir(out.parent)) <= {out.name}
        return True

    disturb(out, straight, count, lambda process: process.terminate(), after)
    check_finished(out, straight)


# ------------------------------------------------------------------------------------------- the full disk


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_at_every_step_of_saving_says_what_the_file_holds(step, out, straight, monkeypatch, capsys):
    shrink(monkeypatch, "train")
    argv = [str(word) for word in [*OPTIONS, "--out", out]]
    assert train.main([*argv[:-2], "--seed", "1", *argv[-2:]]) == 0
    before, number, told = out.read_bytes(), 1, set()
    while True:

        def strike(at, what, number=number):
            if at == number:
                raise KeyboardInterrupt

        out.write_bytes(before)
        capsys.readouterr()
        with Disk(out.parent, strike, removing=False) as disk:
            status = train.main(argv)
        if disk.count < number:
            break
        said = capsys.readouterr()
        if status:
            assert status == 130 and said.err == "" and os.listdir(out.parent) == [out.name]
            line = said.out.splitlines()[-1]
            told.add("still what it was" in line)
            if out.read_bytes() == before:
                assert line == f"interrupted before the first epoch ended: {out} is still what it was"
            else:
                assert check(out, straight) >= 1
                assert (
                    line == f"interrupted: {out} holds the run up to its last whole epoch; --resume goes on"
                )
        number += step
    assert told == {True, False}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs the limits of Unix")
def test_training_where_files_cannot_grow(out, straight):
    log, disk = out.parent.parent / "log", (out.parent, limit)
    assert run("train", command(out), log) == 0
    size = out.stat().st_size
    for most in (4096, size // 2, size - 1):
        out.unlink(missing_ok=True)
        assert run("train", command(out), log, (*disk, most)) == 2
        assert "a.pt: cannot be written (File too large)" in log.read_text().splitlines()[-1]
        assert "Traceback" not in log.read_text() and check(out, straight) < EPOCHS
        assert set(os.listdir(out.parent)) <= {out.name}
        assert run("train", command(out), log) == 0
        check_finished(out, straight)


def test_training_on_a_tiny_disk(out, straight):
    log = out.parent.parent / "log"
    with tiny_disk(out.parent) as resize:
        # room for nothing, for half a checkpoint, for the first, which is small, and for nearly two
        for size, epoch in (("4k", -1), ("64k", -1), ("600k", 0), ("800k", 1)):
            out.unlink(missing_ok=True)
            assert resize(size)
            assert run("train", command(out), log) == 2
            assert "a.pt: cannot be written (No space left on device)" in log.read_text().splitlines()[-1]
            assert "Traceback" not in log.read_text() and check(out, straight) == epoch
            assert set(os.listdir(out.parent)) <= {out.name}
            assert resize("8m")
            assert run("train", command(out), log) == 0
            check_finished(out, straight)


# ------------------------------------------------------------------------------------------------ pictures


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "a.pt"
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, "train")
        assert train.main([*TRAIN, "--epochs", "1", "--out", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    "ending, old, step",
    [
        ("png", b"old picture", 3),
        *(pytest.param(ending, None, 1, marks=pytest.mark.slow) for ending in ("png", "svg", "pdf")),
    ],
)
def test_viz_on_a_full_disk(model, tmp_path, capsys, ending, old, step):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run"
    folder.mkdir()
    pictures = [folder / f"{name}.{ending}" for name in ("map", "curve")]

    def reset():
        for picture in pictures:
            picture.unlink(missing_ok=True)
            if old:
                picture.write_bytes(old)

    def main():
        return viz.main(["--checkpoint", str(model), "--device", "cpu", "--digits", "123",
                         "--out", str(pictures[0]), "--curve", str(pictures[1])])  # fmt: skip

    def after(status):
        left = {path: path.read_bytes() for path in folder.iterdir()}
        assert left.keys() <= set(pictures)
        assert all(content == old or len(content) > 5000 for content in left.values())
        assert status == 0 or left.get(pictures[1]) == old
        reset()

    reset()
    assert fill(folder, main, after, capsys, step) == 0


def test_mha_vs_sdpa_on_a_full_disk(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    import mha_vs_sdpa as mha

    options = ["--lengths", "8,16", "--batch", "1", "--d-model", "8", "--heads", "2", "--repeats", "2"]
    options += ["--warmup", "1", "--device", "cpu", "--out", str(tmp_path / "a.png")]
    document = mha.run(mha.parse_args(options))
    monkeypatch.setattr(mha, "run", lambda args: document)
    assert fill(tmp_path, lambda: mha.main(options), lambda status: None, capsys) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("half", [False, True])
def test_peak_memory_is_unknown_where_there_is_no_room_for_the_trace(tmp_path, monkeypatch, half):
    from toolbox.measure import peak_bytes

    def call():
        return torch.ones(1000) * 2

    assert peak_bytes(call, torch.device("cpu")) >= 8000
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if half:
        monkeypatch.setattr("toolbox.measure.traced", lambda *_, **__: HalfTrace())
        assert peak_bytes(call, torch.device("cpu")) is None
    else:
        with Disk(tmp_path, full(1, True)) as disk:
            assert peak_bytes(call, torch.device("cpu")) is None
        assert disk.count == 1
    assert list(tmp_path.iterdir()) == []


class HalfTrace:
    def export_chrome_trace(self, path):
        with open(path, "w", encoding="utf-8") as file:
            file.write('{"traceEvents": [')


# ------------------------------------------------------------------- shapes and types without an answer


def tiny():
    torch.manual_seed(0)
    return Transformer(13, 13, d_model=16, num_heads=2, dff=16, num_layers=1, max_len=14).eval()


def noise(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def epoch(src, batch_size):
    model = tiny()
    state = train.make_optimizer(model, train.RECIPES["chapter"])
    return train.train_epoch(model, *state, src, TGT, batch_size, "fp32")


SRC, TGT = train.make_dataset(4, 0)
Q, LONGER = noise(2, 2, 8, 4), noise(2, 2, 10, 4)
LOGITS = noise(4, 13, 13)
WRONG = (ValueError, TypeError, RuntimeError, IndexError)  # the last two: PyTorch's own
# what it is -> a call that must not answer, and what the error says
NO_ANSWER = {
    "ids: float": (lambda: tiny()(SRC.float(), TGT), "indices"),
    "ids: beyond the vocabulary": (lambda: tiny()(SRC + 13, TGT), "out of range"),
    "ids: negative": (lambda: tiny()(SRC - 13, TGT), "out of range"),
    "ids: one row without a batch": (lambda: tiny()(SRC[0], TGT[0]), "too many indices"),
    "ids: one dimension too many": (lambda: tiny()(SRC[None], TGT[None]), "must match"),
    "ids: two batches": (lambda: tiny()(SRC, TGT[:3]), "must match"),
    "ids: too long": (lambda: tiny()(SRC, torch.cat([TGT, TGT], 1)), "max_len=14"),
    "mask: float": (lambda: scaled_dot_product_attention(Q, Q, Q, noise(8, 8)), "boolean"),
    "mask: float, SDPA": (lambda: fused_attention(Q, Q, Q, noise(8, 8)), "Boolean"),
    "mask: integer": (lambda: scaled_dot_product_attention(Q, Q, Q, torch.eye(8).long()), "boolean"),
    "mask: integer, SDPA": (lambda: fused_attention(Q, Q, Q, torch.eye(8).long()), "dtype"),
    "mask: wrong length": (lambda: scaled_dot_product_attention(Q, Q, Q, noise(8, 7) > 0.5), "size"),
    "values: more than keys": (lambda: scaled_dot_product_attention(Q, Q, LONGER), "size"),
    "values: more than keys, SDPA": (lambda: fused_attention(Q, Q, LONGER), "8 keys and 10 values"),
    "values: more than keys, tiles": (lambda: tiled(Q, Q, LONGER, tile=4), "8 keys and 10 values"),
    "keys: none, tiles": (lambda: tiled(Q, Q[:, :, :0], Q[:, :, :0]), "at least 1"),
    "causal: Lq != Lk": (lambda: tiled(Q, LONGER, LONGER, is_causal=True), "one length"),
    "causal: mask beside it": (lambda: tiled(Q, Q, Q, noise(1, 1, 8, 8) > 0.5, True), "no mask"),
    "mask: float, tiles": (lambda: tiled(Q, Q, Q, noise(1, 1, 8, 8)), "boolean"),
    "mask: without batch and heads, tiles": (lambda: tiled(Q, Q, Q, noise(8, 8) > 0.5), "expanded size"),
    "cache: of another depth": (lambda: tiny().decode(TGT, *tiny().encode(SRC), KVCache(2)), "longer"),
    "norm_first: a word": (lambda: Transformer(13, 13, norm_first="post"), "norm_first='post'"),
    "tie_output: a word": (lambda: Transformer(13, 13, tie_output="no"), "tie_output='no'"),
    "share_embeddings: a number": (lambda: Transformer(13, 13, share_embeddings=1), "share_embeddings=1"),
    "strings: fewer than none": (lambda: train.make_dataset(-1, 0), "n=-1"),
    "strings: shortened": (lambda: train.make_dataset(5, 0, -3), "extra_long=-3"),
    "strings: rows of two numbers": (lambda: train.drop_seen(SRC, TGT[:3], SRC), "shape"),
    "names: negative id": (lambda: train.token_name(-1), "id -1"),
    "names: id 13": (lambda: train.decode_digits(torch.tensor([13])), "id 13"),
    "names: float ids": (lambda: train.decode_digits(torch.tensor([3.0])), "float"),
    "names: a batch": (lambda: train.decode_digits(SRC), "not supported"),
    "digits: letters": (lambda: train.encode_digits("1a"), "invalid"),
    "schedule: no width": (lambda: train.noam_lambda(-4, 10), "d_model=-4"),
    "loss: target transposed": (lambda: train.loss_sum(LOGITS, TGT[:, 1:].T), "do not score"),
    "loss: another batch": (lambda: train.loss_sum(LOGITS[:1], TGT[:, 1:]), "do not score"),
    "loss: float target": (lambda: train.loss_sum(LOGITS, TGT[:, 1:].float()), "Long"),
    "loss: beyond the vocabulary": (lambda: train.loss_sum(LOGITS, TGT[:, 1:] + 13), "out of bounds"),
    "epoch: more targets": (
        lambda: epoch(SRC[:2], 2),
        "2 sources",
    ),
    "epoch: no batch": (lambda: epoch(SRC, 5), "batch_size=5"),
    "decoding: float ids": (lambda: train.greedy_decode(tiny(), SRC.float()), "indices"),
    "decoding: no token": (lambda: train.greedy_decode(tiny(), SRC[:, :0]), "no tokens"),
    "decoding: one row": (lambda: train.greedy_decode(tiny(), SRC[0]), "ndex|range"),
    "scores: one target for all": (lambda: train.exact_rows(tiny(), SRC, TGT[:1]), "4 sources and 1"),
    "map: not square": (lambda: viz.antidiagonal(noise(2, 3)), "square"),
    "map: empty": (lambda: viz.antidiagonal(noise(0, 0)), "square"),
    "map: three dimensions": (lambda: viz.antidiagonal(noise(1, 3, 3)), "unpack"),
    "map: a row without a name": (lambda: viz.draw_map(noise(3, 3), "ab", "abc", "", None), "number"),
    "map: a name too many": (lambda: viz.draw_map(noise(3, 3), "abc", "abcd", "", None), "number"),
    "grid: a row without a name": (lambda: viz.draw_grid(noise(1, 2, 3, 3), "ab", "abc", "", None), "number"),
}


@pytest.mark.parametrize("what", NO_ANSWER)
def test_what_has_no_answer_gets_none(what):
    if what.startswith(("map", "grid")):
        pytest.importorskip("matplotlib")
    call, words = NO_ANSWER[what]
    with pytest.raises(WRONG, match=words):
        call()


def test_one_row_goes_with_every_other():
    """A batch of 1 is broadcast, as everywhere in PyTorch: the answer is that of the row repeated."""
    model, first = tiny(), slice(0, 1)
    with torch.no_grad():
        for src, tgt in ((SRC[first], TGT), (SRC, TGT[first])):
            repeated = src.expand(4, -1), tgt.expand(4, -1)
            torch.testing.assert_close(model(src, tgt), model(*repeated))
    mask = noise(2, 1, 8, 8) > 0.5
    one, both = Q[first], Q[first].expand(2, -1, -1, -1)
    for attention in (lambda *x: scaled_dot_product_attention(*x)[0], tiled):
        torch.testing.assert_close(attention(one, one, one, mask), attention(both, both, both, mask))


def test_an_empty_batch_has_an_empty_answer():
    model, none = tiny(), SRC[:0]
    assert model(none, TGT[:0]).shape == (0, 14, 13) and len(train.greedy_decode(model, none)) == 0
    assert train.exact_rows(model, none, TGT[:0]).shape == (0,) and train.make_dataset(0, 0)[0].shape == (
        0,
        14,
    )
    assert model(SRC, TGT[:, :0]).shape == (4, 0, 13)
