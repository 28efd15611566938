"""The exported encoder and decoder step against the model, by the code that docs/export.md shows."""

import re

import pytest
import torch
from processes import ROOT

import train
from train import BOS_ID, EOS_ID, SEQ_LEN, VOCAB

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(encoding="utf-8"), re.S)
CLOSE = 1e-5


@pytest.fixture(scope="module", params=["manual", "sdpa"])
def exported(request, tmp_path_factory):
    """The folder and the variables that the page's code leaves behind."""
    folder = tmp_path_factory.mktemp("export")
    run = train.RECIPES["chapter"] | dict(seed=0)
    model = train.make_model(run)
    if request.param == "sdpa":
        model = type(model)(**model.settings | dict(attention="sdpa"))
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train.save_checkpoint("reverse_transformer.pt", model, *train.make_optimizer(model, run), [], run)
        exec(BLOCKS[0], found)
    return folder, found


def largest_difference(model, encode, step):
    """|exported - model| over every source length, some target lengths and batches, padding in between."""
    worst, random = 0.0, torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for Ls in range(1, SEQ_LEN + 1):
            for B, Lt in ((1, 1), (3, SEQ_LEN), (2, Ls)):
                src, tgt_in = (torch.randint(VOCAB, (B, n), generator=random) for n in (Ls, Lt))
                src[:, 0], tgt_in[:, 0] = EOS_ID, BOS_ID  # no row of nothing but padding
                memory, src_mask = model.encode(src)
                expected = model.decode(tgt_in, memory, src_mask)[0][:, -1]
                ours, mask = encode(src)
                assert torch.equal(mask, src_mask)
                worst = max(worst, (ours - memory).abs().max().item())
                worst = max(worst, (step(tgt_in, memory, src_mask) - expected).abs().max().item())
    return worst


def test_the_exported_model_is_the_model(exported):
    folder, found = exported
    parts = [torch.export.load(folder / f"{name}.pt2").module() for name in ("encode", "step")]
    assert largest_difference(found["model"], *parts) < CLOSE


def test_lengths_beyond_the_table_are_refused(exported):
    _, found = exported
    with pytest.raises(Exception, match="(?i)range|<=|guard|expected"):
        found["encode"].module()(torch.full((2, SEQ_LEN + 1), EOS_ID))


def test_the_onnx_model_is_the_model(exported, monkeypatch):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="pip install onnx onnxscript onnxruntime")
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnx onnxscript onnxruntime")
    folder, found = exported
    monkeypatch.chdir(folder)
    exec(BLOCKS[1], found)
    encode = torch.onnx.export(found["encode"], dynamo=True, input_names=["src"])
    encode.save("encode.onnx")
    sessions = {name: onnxruntime.InferenceSession(f"{name}.onnx") for name in ("encode", "step")}

    def call(name, *inputs):
        names = [entry.name for entry in sessions[name].get_inputs()]
        outputs = sessions[name].run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))
        return [torch.from_numpy(output) for output in outputs]

    def run_encode(src):
        return call("encode", src)

    def run_step(*inputs):
        return call("step", *inputs)[0]

    assert largest_difference(found["model"], run_encode, run_step) < CLOSE
