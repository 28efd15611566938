"""What only a CUDA GPU can show: the CPU's results there, and its own precisions. Skipped without one."""

import pytest
import torch
from test_train import optimizer_for

import mha_vs_sdpa
import train
from model import PAD_ID
from test_model import random_ids, small_model
from toolbox.measure import without_tf32

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("attention", ["manual", "sdpa"])
@without_tf32()
def test_logits_and_greedy_output_equal_those_of_the_cpu(attention):
    model, (src, tgt) = small_model(attention=attention), train.make_dataset(50, 0)
    logits, output = model(src, tgt), train.greedy_decode(model, src)
    model.cuda()
    torch.testing.assert_close(model(src.cuda(), tgt.cuda()).cpu(), logits, atol=1e-4, rtol=0)
    assert torch.equal(train.greedy_decode(model, src.cuda()).cpu(), output)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_few_steps_lower_the_loss(precision):
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16 units")
    model = small_model(dropout=0.1).cuda().train()
    src, tgt = (ids.cuda() for ids in train.make_dataset(64, 0))
    optimizer, scheduler = optimizer_for(model, lr=3e-3)
    totals = [train.train_step(model, optimizer, scheduler, src, tgt, precision) for _ in range(30)]
    assert totals[0].is_cuda and totals[-1][0] < 0.9 * totals[0][0]
    assert all(p.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_half_precision_with_a_row_of_padding():
    model, src = small_model().cuda().half(), random_ids(2, 5).cuda()
    src[0] = PAD_ID
    assert model(src, src).isfinite().all()


def test_benchmark_runs(capsys):
    assert mha_vs_sdpa.main(["--batch", "2", "--length", "128", "--d-model", "64", "--repeats", "3"]) == 0
    out = capsys.readouterr().out
    assert "n/a" not in out and "out of memory" not in out
