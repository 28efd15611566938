"""Wrong uses of every command: each is one line with status 2, and no file of the folder changes."""

import hashlib
import importlib
import os
import shlex

import pytest
import torch

import train
from benchmarks import run as benchmarks_run
from exercises import run as exercises_run

pytest.importorskip("sentencepiece", reason="pip install -r translation/requirements.txt")
translation_train = importlib.import_module("translation.train")

COMMANDS = {
    "train": "train", "viz": "viz", "mha": "mha_vs_sdpa", "exercises": "exercises.run",
    "benchmarks": "benchmarks.run", "recipes": "benchmarks.recipes", "steps": "benchmarks.step_time",
    "decoding": "benchmarks.decode_time", "prepare": "translation.prepare", "learn": "translation.train",
    "translate": "translation.translate", "evaluate": "translation.evaluate",
    "attention": "translation.attention", "breakdown": "translation.breakdown", "unmasked": "page.unmasked",
}  # fmt: skip
DIGITS = "9" * 400  # a number that fits nowhere

# command and options | what the line must name: the option or file, the value, what is legal
TABLE = f"""
train --epochs 0                                        | --epochs '0' at least 1 at most 1000000
train --epochs -3                                       | --epochs '-3'
train --epochs 1.5                                      | --epochs '1.5' whole number
train --epochs {DIGITS}                                 | --epochs at most 1000000
train --batch-size 0                                    | --batch-size '0' at least 1
train --batch-size 100000000000000000000                | --batch-size at most 10000000
train --batch-size 65 --samples 64                      | --batch-size 65 --samples 64
train --samples nan                                     | --samples 'nan' whole number
train --samples 10000001                                | --samples '10000001' at most 10000000
train --warmup 0                                        | --warmup '0' at least 1
train --warmup {DIGITS}                                 | --warmup at most 1000000000
train --recipe fast --samples 640                       | --warmup 40 10 updates
train --seed -1                                         | --seed '-1' at least 0
train --seed 4294967296                                 | --seed '4294967296' at most 4294967295
train --recipe slow                                     | --recipe 'slow' chapter fast
train --device tpu                                      | --device 'tpu' auto cpu cuda
train --precision fp16                                  | --precision 'fp16' bf16 fp32
train --out absent/a.pt                                 | --out absent/a.pt folder that exists
train --out folder                                      | --out folder must be a file
train --out ""                                          | --out '' name of a file
train --out notes.txt                                   | --out notes.txt no checkpoint
train --out picture.png                                 | --out picture.png no checkpoint
train --out kept.pt                                     | --out kept.pt read-only
train --out loop                                        | --out loop must be a file
train --out ROOT/model.py                               | --out model.py file of this project
train --resume --out absent.pt                          | absent.pt no such checkpoint train.py
train --resume --out notes.txt                          | notes.txt not a checkpoint
train --resume --out half.pt                            | half.pt not a checkpoint
train --resume --out other.pt                           | other.pt not a checkpoint no
train --resume --out model.pt --batch-size 8            | --batch-size 8 model.pt was made with 16
train --resume --out variant.pt                         | variant.pt causal-cross
train --epoch 3                                         | unrecognized --epoch
viz --checkpoint absent.pt                              | --checkpoint absent.pt train.py
viz --checkpoint notes.txt                              | --checkpoint notes.txt not a checkpoint
viz --checkpoint half.pt                                | --checkpoint half.pt not a checkpoint
viz --checkpoint folder                                 | --checkpoint folder
viz --checkpoint run/last.pt                            | --checkpoint run/last.pt
viz --checkpoint variant.pt                             | --checkpoint variant.pt causal-cross
viz --checkpoint model.pt --digits ""                   | --digits '' 1 to 12 digits
viz --checkpoint model.pt --digits 12x                  | --digits '12x' 1 to 12 digits
viz --checkpoint model.pt --digits 1234567890123        | --digits '1234567890123' 1 to 12
viz --checkpoint model.pt --layer 3                     | --layer 3 layers 1 to 2
viz --checkpoint model.pt --layer 0                     | --layer '0' at least 1
viz --checkpoint model.pt --head 5                      | --head 5 heads 1 to 4
viz --checkpoint model.pt --head {DIGITS}               | --head at most
viz --checkpoint model.pt --grid --layer 1              | --grid --layer 1
viz --checkpoint model.pt --kind self                   | --kind 'self' cross encoder decoder
viz --checkpoint model.pt --out a.xyz                   | --out a.xyz .png .svg
viz --checkpoint model.pt --out absent/a.png            | --out absent/a.png folder that exists
viz --checkpoint model.pt --out a.png --curve ./a.png   | --curve a.png --out
viz --checkpoint model.pt --out a.png --curve folder/../a.png | --curve --out
viz --checkpoint model.png --out model.png              | --out model.png --checkpoint
viz --checkpoint untrained.pt --curve                   | --curve untrained.pt history
viz --checkpoint model.pt --html absent/a.html          | --html absent/a.html folder that exists
viz --checkpoint model.pt --html folder                 | --html folder must be a file
viz --checkpoint model.pt --html notes.txt              | --html notes.txt no page
viz --checkpoint model.pt --html ROOT/page/template.html | --html template.html file of this project
viz --checkpoint model.pt --html ROOT/page/model.js     | --html model.js file of this project
viz --checkpoint model.pt --html model.pt               | --html model.pt
viz --checkpoint model.pt --html ""                     | --html '' name of a file
viz --checkpoint absent.pt --html a.html                | --checkpoint absent.pt train.py
viz --checkpoint notes.txt --html a.html                | --checkpoint notes.txt not a checkpoint
viz --checkpoint untrained.pt --html a.html             | --checkpoint untrained.pt untrained
viz --checkpoint variant.pt --html a.html               | --checkpoint variant.pt causal-cross
viz --checkpoint post-norm.pt --html a.html             | --checkpoint post-norm.pt not the model of train.py
viz --checkpoint bare.pt --html a.html                  | --checkpoint bare.pt not a checkpoint of train.py
viz --checkpoint model.pt --html a.html --unmasked model.pt | --unmasked model.pt 'recipe' no-causal-mask
viz --checkpoint model.pt --html a.html --unmasked absent.pt | --unmasked absent.pt page.unmasked
viz --checkpoint model.pt --html a.html --digits 12x    | --digits '12x' 1 to 12 digits
viz --checkpoint model.pt --html a.html --grid          | --html --grid every
viz --checkpoint model.pt --html a.html --kind decoder  | --html --kind every
viz --checkpoint model.pt --html a.html --layer 1       | --html --layer every
viz --checkpoint model.pt --html a.html --head 2        | --html --head every
viz --checkpoint model.pt --html a.html --out a.png     | --html --out picture
viz --checkpoint model.pt --html a.html --curve         | --html --curve picture
viz --checkpoint model.pt --unmasked unmasked.pt        | --unmasked unmasked.pt --html
unmasked --seed -1                                      | --seed '-1' at least 0
unmasked --out absent/a.pt                              | --out absent/a.pt folder that exists
unmasked --out notes.txt                                | --out notes.txt no checkpoint
mha --length 0                                          | --length '0' at least 1
mha --length {DIGITS}                                   | --length at most 131072
mha --lengths 512,256                                   | --lengths '512,256' growing
mha --lengths 256,999999999                             | --lengths 131072
mha --lengths 8,16 --length 8                           | --length --lengths
mha --d-model 10 --heads 4                              | --heads 4 --d-model 10
mha --repeats 1                                         | --repeats '1' at least 2
mha --out a.png                                         | --out a.png --lengths
mha --lengths 8,16 --out notes.txt                      | --out notes.txt .png
mha --batch 0                                           | --batch '0'
exercises                                               | NAME --all --list
exercises nonsense                                      | NAME nonsense heads
exercises heads --all                                   | --all heads
exercises heads --seeds 0,x                             | --seeds 'x'
exercises heads --results absent                        | --results absent folder that exists
exercises heads --pictures notes.txt                    | --pictures notes.txt folder that exists
exercises heads --results broken --pictures folder      | heads-1.fast.0.json not a result file
exercises heads --epochs 0                              | --epochs '0'
benchmarks --out a.xyz                                  | --out a.xyz .png
benchmarks --json folder                                | --json folder must be a file
benchmarks --json notes.txt                             | --json notes.txt no JSON file
benchmarks --json a.png --out a.png                     | --out a.png --json
benchmarks --only speed                                 | --only 'speed' attention
recipes --seeds 11                                      | --seeds '11' at most 10
steps --rounds 1                                        | --rounds '1' at least 2
decoding --rounds {DIGITS}                              | --rounds at most
prepare --own --data absent                             | absent/train.de no such file
prepare --sample --data text                            | --data --sample
prepare --sample --vocab-size 10                        | --vocab-size 10 must be
prepare --sample --max-length 0                         | --max-length '0'
prepare --own --data text --src de --tgt de             | --src --tgt de differ
prepare --src fr                                        | --src fr --own
prepare --timeout 0                                     | --timeout '0'
learn --sample --out run                                | --out run --resume
learn --sample --out notes.txt                          | --out notes.txt folder
learn --sample --out foreign                            | --out foreign tokenizer.model
learn --sample --out foreign-log                        | --out foreign-log log.txt
learn --sample --out ""                                 | --out ''
learn --data absent --out new                           | absent/train.de no such file
learn --data uneven --out new                           | train.de 2 lines 3
learn --sample --out new --d-model 10 --num-heads 4     | --d-model 10 --num-heads 4
learn --sample --out new --d-model 4000000000000        | --d-model at most 16384
learn --sample --out new --warmup {DIGITS}              | --warmup at most
learn --sample --out new --lr-factor nan                | --lr-factor 'nan' above 0 at most 1000
learn --sample --out new --lr-factor inf                | --lr-factor 'inf' at most 1000
learn --sample --out new --lr-factor 0                  | --lr-factor '0' above 0
learn --sample --out new --dropout 1                    | --dropout '1' at most 0.99
learn --sample --out new --clip -1                      | --clip '-1' above 0
learn --sample --out new --max-length 1000000000000     | --max-length at most 100000
learn --sample --out new --vocab-size 3                 | --vocab-size 3
learn --resume --out folder                             | --out folder last.pt --resume
learn --resume --out run --d-model 64                   | --d-model 64 run 32
translate --checkpoint absent Hallo                     | --checkpoint absent
translate --checkpoint model.pt Hallo                   | --checkpoint model.pt translation.train
translate --checkpoint run --input absent.txt           | absent.txt cannot be read
translate --checkpoint run --input latin1.txt           | latin1.txt line 1 UTF-8
translate --checkpoint run --input in.txt --output in.txt            | --output in.txt --input
translate --checkpoint run --input in.txt --output hard.txt          | --output hard.txt --input
translate --checkpoint run --input in.txt notes.txt --output o o     | --output o
translate --checkpoint run --input in.txt --output run/best.pt       | --output run/best.pt
translate --checkpoint run --input in.txt --output a b  | --output 2 files 1
translate --checkpoint run --output a                   | --output 1 files 0
translate Hallo --checkpoint run --input in.txt         | --input in.txt Hallo
translate --checkpoint run --beam 1000000000000 Hallo   | --beam at most 1000
translate --checkpoint run --alpha nan Hallo            | --alpha 'nan' at least 0 at most 10
translate --checkpoint run --alpha 1e400 Hallo          | --alpha at most 10
translate --checkpoint run --batch-size 0 Hallo         | --batch-size '0'
evaluate --checkpoint run --sample --split nonsense     | nonsense
evaluate --checkpoint run --sample --out folder         | --out folder must be a file
evaluate --checkpoint run --sample --out run/best.pt    | --out run/best.pt
evaluate --checkpoint run --data text --split train --out text/train.en | --out text/train.en --data
evaluate --checkpoint run --sample --show -1            | --show '-1'
attention --checkpoint run --out a.xyz Hallo            | --out a.xyz .png
attention --checkpoint run --html absent/a.html Hallo   | --html absent/a.html folder that exists
attention --checkpoint run --html notes.txt Hallo       | --html notes.txt no page
attention --checkpoint run --html a.html --grid Hallo   | --html --grid every
attention --checkpoint run --html a.html --out a.png Hallo | --html --out picture
attention --checkpoint run --layer 9 Hallo              | --layer 9 layers 1 to 1
attention --checkpoint run --beam 101 Hallo             | --beam '101' at most 100
attention --checkpoint run ""                           | sentence ''
breakdown                                               | outputs required
breakdown absent.txt --sample                           | absent.txt cannot be read
breakdown folder --sample                               | folder cannot be read directory
breakdown latin1.txt --sample                           | latin1.txt line 1 UTF-8
breakdown in.txt --sample                               | outputs in.txt 1 lines test_2016_flickr 16
breakdown in.txt --sample --split nonsense              | nonsense
breakdown in.txt --data absent                          | absent/test_2016_flickr.de no such file
breakdown in.txt --data text --src de --tgt de          | --src --tgt de must differ
"""
ROWS = [tuple(part.strip() for part in line.split(" | ")) for line in TABLE.strip().splitlines()]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with what a user may have lying about."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("folder", "broken", "text", "uneven", "foreign", "foreign-log"):
        (folder / name).mkdir()
    (folder / "notes.txt").write_text("Buy milk\n")
    (folder / "in.txt").write_text("Ein Hund.\n")
    (folder / "latin1.txt").write_bytes("Tür\n".encode("latin-1"))
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "broken" / "heads-1.fast.0.json").write_text("{")
    (folder / "foreign" / "tokenizer.model").write_bytes(b"precious")
    (folder / "foreign-log" / "log.txt").write_text("precious")
    for name, lines in (("train.de", 2), ("train.en", 3)):
        (folder / "uneven" / name).write_text("a b\n" * lines)
        (folder / "text" / name).write_text("a b\n" * 3)
    os.link(folder / "in.txt", folder / "hard.txt")
    os.symlink("loop", folder / "loop")

    model = train.make_model(train.RECIPES["chapter"] | dict(seed=0))
    run = {name: train.RECIPES["chapter"][name] for name in train.RECIPES["chapter"] if name != "epochs"}
    run |= dict(recipe="chapter", seed=0, batch_size=16)
    state = train.make_optimizer(model, train.RECIPES["chapter"])
    row = dict(epoch=1, loss=1.0, token_acc=0.5, val_exact_match=0.5, lr=0.001, seconds=1.0)
    for name in ("model.pt", "kept.pt", "model.png"):
        train.save_checkpoint(folder / name, model, *state, [row], run)
    train.save_checkpoint(folder / "untrained.pt", model, *state, [], run)
    train.save_checkpoint(folder / "variant.pt", model, *state, [row], run, "causal-cross")
    post = train.Transformer(**model.settings | dict(norm_first=False))
    train.save_checkpoint(folder / "post-norm.pt", post, *state, [row], run)
    torch.save(model.state_dict(), folder / "bare.pt")
    (folder / "half.pt").write_bytes((folder / "model.pt").read_bytes()[:5000])
    torch.save({"settings": {}}, folder / "other.pt")
    os.chmod(folder / "kept.pt", 0o444)

    tiny = ["--sample", "--d-model", "32", "--num-heads", "2", "--dff", "32", "--max-tokens", "1000"]
    tiny += ["--vocab-size", "500", "--bleu-every", "0", "--epochs", "1", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translation_train, "open_tensorboard", lambda *_: None)
        assert translation_train.main([*tiny, "--out", str(folder / "run")]) == 0
    return folder


def contents(folder):
    """path -> a hash of each file, and what each link leads to."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_the_table_is_long_and_covers_every_command():
    assert len(ROWS) >= 80 and {row[0].split()[0] for row in ROWS} == set(COMMANDS)


@pytest.mark.parametrize("command, named", ROWS, ids=[row[0][:70] for row in ROWS])
def test_wrong_use(command, named, desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    monkeypatch.setattr(exercises_run, "train_variant", lambda *_: pytest.fail("it trains"))
    for part in benchmarks_run.MEASURE:
        monkeypatch.setitem(benchmarks_run.MEASURE, part, lambda *_: pytest.fail("it measures"))
    name, *options = shlex.split(command.replace("ROOT", str(train.__file__.rpartition("/")[0])))
    before = contents(desk)
    capsys.readouterr()
    try:
        status = importlib.import_module(COMMANDS[name]).main(options)
    except SystemExit as ended:
        status = ended.code
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1 and error.endswith("\n"), error
    assert error.startswith(COMMANDS[name]) and ": error: " in error and len(error) < 700
    assert all(word in error for word in named.split()), error
    assert contents(desk) == before
