"""Properties of the core that hold for any input: hypothesis makes up the inputs, and shrinks what fails."""

import argparse
import contextlib
import io
import math
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("hypothesis", reason="the property tests need hypothesis, a development tool")

import torch  # noqa: E402
from hypothesis import assume, example, given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from properties import (  # noqa: E402
    MAX_LEN,
    VOCAB,
    close,
    ids,
    models,
    one_line,
    seeds,
    seen_something,
    sizes,
    sources,
    times,
)
from torch import nn  # noqa: E402

import train  # noqa: E402
from mha_vs_sdpa import tiled_attention  # noqa: E402
from model import (  # noqa: E402
    PAD_ID,
    KVCache,
    Transformer,
    attention_weights,
    fused_attention,
    make_causal_mask,
    make_padding_mask,
    scaled_dot_product_attention,
)
from toolbox.checkpoint import CheckpointError, read_checkpoint, rebuild, write_checkpoint  # noqa: E402
from toolbox.command_line import integer, number  # noqa: E402
from toolbox.files import KINDS, FileError, check_output, replacing, unfinished  # noqa: E402
from train import BOS_ID, EOS_ID, NUM_OFFSET, SEQ_LEN, greedy_decode, make_dataset  # noqa: E402

batches = st.integers(1, 4)


# --------------------------------------------------------------------------------------------------- masks


@given(data=st.data(), batch=batches, length=sizes)
def test_masks_are_true_at_padding_and_in_the_future_and_nowhere_else(data, batch, length):
    tokens = data.draw(ids(batch, length))
    padding, causal = make_padding_mask(tokens), make_causal_mask(length, "cpu")
    assert (padding.dtype, padding.shape) == (torch.bool, (batch, 1, 1, length))
    assert (causal.dtype, causal.shape) == (torch.bool, (1, 1, length, length))
    assert padding.flatten(1).tolist() == [[i == PAD_ID for i in row] for row in tokens.tolist()]
    assert causal[0, 0].tolist() == [[key > query for key in range(length)] for query in range(length)]


@times(3)
@given(data=st.data(), batch=batches, heads=st.integers(1, 3), queries=sizes, keys=sizes, seed=seeds,
       d_k=sizes, tile=st.integers(1, 10), strength=st.floats(0, 3))  # fmt: skip
def test_attention_by_hand_in_tiles_and_through_sdpa_agree(
    data, batch, heads, queries, keys, seed, d_k, tile, strength
):
    """For any mask; a row with all keys masked is the mean of v by hand and in tiles, and 0 through SDPA."""
    chance = torch.Generator().manual_seed(seed)
    q, k, v = (
        strength * torch.randn(batch, heads, length, d_k, generator=chance)
        for length in (queries, keys, keys)
    )
    shape = [data.draw(st.sampled_from([1, full])) for full in (batch, heads, queries)] + [keys]
    share = data.draw(st.sampled_from([0.2, 0.5, 0.9]))
    mask = data.draw(st.sampled_from([None, torch.rand(shape, generator=chance) < share]))
    output, weights = scaled_dot_product_attention(q, k, v, mask)
    blind = torch.zeros(batch, heads, queries, dtype=torch.bool)
    if mask is not None:
        full = mask.expand(batch, heads, queries, keys)
        blind = full.all(-1)
        assert not weights[full & ~blind[..., None]].any()  # exactly 0
    assert torch.allclose(weights.sum(-1), torch.ones(batch, heads, queries), atol=1e-5)
    mean = v.mean(2, keepdim=True).expand_as(output)
    in_tiles, (fused, none) = tiled_attention(q, k, v, mask, tile=tile), fused_attention(q, k, v, mask)
    assert torch.allclose(in_tiles, output, atol=1e-4) and none is None
    assert torch.allclose(output[blind], mean[blind], atol=1e-5)
    assert torch.allclose(fused[~blind], output[~blind], atol=1e-4) and not fused[blind].any()
    if queries == keys:
        expected, _ = scaled_dot_product_attention(q, k, v, make_causal_mask(keys, "cpu"))
        assert torch.allclose(tiled_attention(q, k, v, is_causal=True, tile=tile), expected, atol=1e-4)


@given(data=st.data(), model=models(), batch=batches, src_len=sizes, tgt_len=sizes)
def test_masked_tokens_may_be_any(data, model, batch, src_len, tgt_len):
    """Other tokens under the mask change nothing where there is none; masked keys have weight exactly 0."""
    src, tgt = data.draw(ids(batch, src_len)), data.draw(ids(batch, tgt_len))
    src_mask, future = make_padding_mask(src), make_causal_mask(tgt_len, "cpu")
    self_mask = make_padding_mask(tgt) | future
    other_src = torch.where(src == PAD_ID, data.draw(ids(batch, src_len)), src)
    other_tgt = torch.where(tgt == PAD_ID, data.draw(ids(batch, tgt_len)), tgt)
    has_source, real = (src != PAD_ID).any(1), tgt != PAD_ID
    memory, other_memory = (model.encoder(tokens, src_mask)[0] for tokens in (src, other_src))
    assert memory.isfinite().all() and close(memory, other_memory, src != PAD_ID)
    out = model.decoder(tgt, memory, self_mask, src_mask)[0]
    other_out = model.decoder(other_tgt, other_memory, self_mask, src_mask)[0]
    assert out.isfinite().all() and close(out, other_out, real & has_source[:, None])

    seen = {"encoder": has_source[:, None].expand_as(src), "decoder": seen_something(tgt)}
    seen["cross"] = has_source[:, None].expand_as(tgt)
    masks = {"encoder": src_mask, "decoder": self_mask, "cross": src_mask}
    for kind, layers in attention_weights(model, src, tgt).items():
        for weights in layers:
            assert close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
            assert not weights[masks[kind].expand_as(weights) & seen[kind][:, None, :, None]].any(), kind


@given(data=st.data(), model=models(), batch=batches, src_len=sizes, tgt_len=sizes)
def test_logits_do_not_depend_on_padding_neighbours_or_the_future(data, model, batch, src_len, tgt_len):
    src, tgt = data.draw(ids(batch, src_len)), data.draw(ids(batch, tgt_len))
    logits = model(src, tgt)
    counts = seen_something(tgt) & (src != PAD_ID).any(1, keepdim=True)
    assert logits.shape == (batch, tgt_len, VOCAB) and logits.isfinite().all()
    # One row alone, without the padding at its ends or with more of it.
    row = data.draw(st.integers(0, batch - 1))
    alone = []
    for tokens in (src, tgt):
        used = int((tokens[row] != PAD_ID).nonzero().max()) + 1 if tokens[row].any() else 1
        fill = data.draw(st.integers(used, MAX_LEN))
        alone.append(torch.cat([tokens[row, :used], tokens.new_full((fill - used,), PAD_ID)])[None])
    both = min(tgt_len, alone[1].size(1))
    assert close(model(*alone)[:, :both], logits[row : row + 1, :both], counts[row : row + 1, :both])
    # Other tokens from some position on.
    cut = data.draw(st.integers(0, tgt_len))
    other = torch.cat([tgt[:, :cut], data.draw(ids(batch, tgt_len - cut))], dim=1)
    assert close(model(src, other)[:, :cut], logits[:, :cut], counts[:, :cut])


# --------------------------------------------------------------------------------------------- the KV cache


@given(data=st.data(), model=models(), batch=batches, src_len=sizes)
def test_decoding_with_a_cache_equals_decoding_the_whole_prefix(data, model, batch, src_len):
    """In steps of any size, with the rows chosen and reordered at any time."""
    src, tgt = data.draw(ids(batch, src_len)), data.draw(ids(batch, MAX_LEN))
    memory, src_mask = model.encode(src)
    cache, done = KVCache(model.settings["num_layers"]), 0
    while done < MAX_LEN:
        size = data.draw(st.integers(1, MAX_LEN - done))
        found, found_weights = model.decode(tgt[:, done : done + size], memory, src_mask, cache)
        assert cache.start == done and torch.equal(cache.ids, tgt[:, : done + size])
        expected, weights = model.decode(tgt[:, : done + size], memory, src_mask)
        counts = seen_something(tgt)[:, done : done + size] & (src != PAD_ID).any(1, keepdim=True)
        assert close(found, expected[:, done:], counts)
        for a, b in zip(found_weights, weights, strict=True):
            if a is not None:
                assert close(a.transpose(1, 2), b[:, :, done:].transpose(1, 2), counts)
        done += size
        if data.draw(st.booleans()):
            rows = torch.tensor(data.draw(st.lists(st.integers(0, len(tgt) - 1), min_size=1, max_size=5)))
            cache.select(rows)
            src, tgt, memory, src_mask = src[rows], tgt[rows], memory[rows], src_mask[rows]


# ------------------------------------------------------------------------------------------ greedy decoding


def naive_greedy(model, row, max_len):
    """The source ids of one sentence -> the likeliest token each time, all computed anew each time."""
    output = [BOS_ID]
    while len(output) < max_len and output[-1] != EOS_ID:
        scores = model(torch.tensor([row]), torch.tensor([output]))[0, -1].tolist()
        output.append(max(range(EOS_ID, VOCAB), key=scores.__getitem__))
    return output


@times(2)
@given(data=st.data(), model=models(), batch=batches, max_len=sizes, use_cache=st.booleans())
def test_greedy_decoding_in_a_batch_is_the_naive_loop_on_each(data, model, batch, max_len, use_cache):
    src = data.draw(sources(batch))
    output = greedy_decode(model, src, max_len, use_cache)
    expected = [naive_greedy(model, [i for i in row if i != PAD_ID], max_len) for row in src.tolist()]
    longest = max(map(len, expected))
    assert output.tolist() == [row + [PAD_ID] * (longest - len(row)) for row in expected]
    assert longest <= max_len and all(row[-1] == EOS_ID or len(row) == max_len for row in expected)


# ------------------------------------------------------------------------------------- train.py: data, rates


@given(n=st.integers(0, 40), more=st.integers(0, 5), seed=seeds, extra_long=st.integers(0, 5))
def test_strings_are_laid_out_as_documented_and_the_first_ones_stay_when_more_are_drawn(
    n, more, seed, extra_long
):
    src, tgt = make_dataset(n, seed, extra_long)
    assert src.shape == tgt.shape == (n, SEQ_LEN) and src.dtype == tgt.dtype == torch.int64
    for source, target in zip(src, tgt, strict=True):
        digits = train.decode_digits(source)
        assert train.MIN_LEN <= len(digits) <= train.MAX_LEN and train.decode_digits(target) == digits[::-1]
        padding = [PAD_ID] * (SEQ_LEN - len(digits))
        assert source.tolist() == (train.encode_digits(digits)[0].tolist() + padding)[:SEQ_LEN]
        reverse = train.encode_digits(digits[::-1])[0].tolist()
        assert target.tolist() == ([BOS_ID, *reverse] + padding)[:SEQ_LEN]
    for part, whole in zip((src, tgt), make_dataset(n + more, seed, extra_long), strict=True):
        assert torch.equal(part, whole[:n])


@given(texts=st.lists(st.text("0123456789", max_size=12)))
def test_digits_come_back_whatever_stands_behind_eos(texts):
    for text in texts:
        row = torch.cat([train.encode_digits(text)[0], train.encode_digits(texts[0])[0]])
        assert (
            train.decode_digits(row) == train.decode_digits(torch.cat([torch.tensor([BOS_ID]), row])) == text
        )


@times(5)
@given(data=st.data())
def test_drop_seen_keeps_exactly_the_unseen_rows_in_order(data):
    rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple), max_size=20)

    def table(pairs):  # short strings of few digits, so that many occur twice
        lines = [
            [d + NUM_OFFSET for d in row] + [EOS_ID] + [PAD_ID] * (SEQ_LEN - len(row) - 1) for row in pairs
        ]
        return torch.tensor(lines, dtype=torch.int64).view(-1, SEQ_LEN)

    drawn, seen = data.draw(rows), data.draw(rows)
    src, number_of = table(drawn), torch.arange(len(drawn))
    kept_src, kept = train.drop_seen(src, number_of, table(seen))
    expected = [i for i, row in enumerate(drawn) if row not in seen]
    assert kept.tolist() == expected and torch.equal(kept_src, src[expected])


class Echo(nn.Module):
    """Stands in for a model: its decoded output is the right one, but for strings that `wrong` picks."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def decode(self, src, max_len):
        rows = []
        for row in src:
            digits = train.decode_digits(row)
            out = [BOS_ID, *train.encode_digits(digits[::-1])[0].tolist()]
            if self.wrong(digits):
                out[-1] = NUM_OFFSET  # the right digits and one more
            rows.append((out + [PAD_ID] * SEQ_LEN)[:max_len])  # max_len is SEQ_LEN
        longest = max((SEQ_LEN - row.count(PAD_ID) for row in rows), default=1)
        return torch.tensor([row[:longest] for row in rows], dtype=torch.int64).view(-1, longest)


@given(seed=seeds, size=st.integers(1, 30), known=st.integers(0, 30), batch_size=st.integers(1, 31),
       residue=st.integers(0, 4), modulus=st.integers(1, 4))  # fmt: skip
def test_the_report_counts_what_is_right(seed, size, known, batch_size, residue, modulus):
    model = Echo(lambda digits: int(digits) % modulus == residue)
    small = dict(TEST_SIZE=size, TEST_SEED=seed, VAL_DRAWN=40, VAL_SCORED=20)
    small["greedy_decode"] = lambda model, src, max_len=SEQ_LEN: model.decode(src, max_len)
    out = io.StringIO()
    with mock.patch.multiple(train, **small), contextlib.redirect_stdout(out):
        src, tgt = make_dataset(2 * size, seed)
        right = train.exact_rows(model, src, tgt, batch_size)
        texts = [train.decode_digits(row) for row in src]
        assert right.tolist() == [not model.wrong(text) for text in texts]
        assert train.exact_match(model, src, tgt) == pytest.approx(sum(right.tolist()) / len(right))
        train.report(model, src[:known], torch.device("cpu"))
    texts = [text for text in texts if text not in set(texts[:known])][:size]
    lengths, good = Counter(map(len, texts)), Counter(len(text) for text in texts if not model.wrong(text))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(f"exact match on {len(texts)} unseen")
    columns = [*range(train.MIN_LEN, train.MAX_LEN + 1)]
    assert lines[1].split() == ["length", *map(str, columns), "all"]
    assert lines[2].split()[1:] == [str(lengths[n]) for n in columns] + [str(len(texts))]
    shares = [f"{good[n] / lengths[n]:.4f}" if lengths[n] else "-" for n in columns]
    total = f"{good.total() / len(texts):.4f}" if texts else "-"
    for found, expected in zip(lines[3].split()[1:], [*shares, total], strict=True):
        assert found == expected or float(found) == pytest.approx(float(expected), abs=1.01e-4)


@times(5)
@given(d_model=st.integers(1, 4096), warmup=st.integers(1, 10**5), step=st.integers(0, 10**6))
def test_noam_rises_to_the_peak_at_warmup_and_falls_after_it(d_model, warmup, step):
    rate = train.noam_lambda(d_model, warmup)
    update = step + 1
    expected = min(update**-0.5, update * warmup**-1.5) / math.sqrt(d_model)
    assert rate(step) == pytest.approx(expected, rel=1e-12) and rate(step) > 0
    assert (rate(step + 1) > rate(step)) == (update < warmup)
    assert rate(warmup - 1) == pytest.approx((d_model * warmup) ** -0.5)
    with pytest.raises(ValueError, match=f"warmup={-step}: "):
        train.noam_lambda(d_model, -step)


@times(5)
@given(data=st.data(), peak=st.floats(1e-6, 1.0), total=st.integers(1, 10**6))
def test_linear_decay_is_two_straight_lines_and_ends_at_zero(data, peak, total):
    warmup = data.draw(st.integers(1, total))
    rate, step = train.linear_decay_lambda(peak, warmup, total), data.draw(st.integers(0, total - 1))
    ends = (warmup, 0, peak) if step < warmup else (total - warmup + 1, warmup - 1, -peak)
    length, start, rise = ends
    height = max(-rise, 0) + rise * (step + (step < warmup) - start) / length
    assert rate(step) == pytest.approx(height, rel=1e-9) and 0 < rate(step) <= peak
    assert rate(warmup - 1) == peak and rate(total) == 0 == rate(total + step)
    for wrong in (0, total + 1):
        with pytest.raises(ValueError, match=f"warmup={wrong}: "):
            train.linear_decay_lambda(peak, wrong, total)


# ------------------------------------------------------------------------------------ toolbox: checkpoints


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    lambda dtype, shape, first: (torch.arange(math.prod(shape)) + first).to(dtype).view(shape),
    dtypes, shapes, st.integers(-99, 99),
)  # fmt: skip
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)
checkpoints = st.dictionaries(st.text(), values, max_size=4)


def same(a, b) -> bool:
    """Equal in value, type and dtype; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@times(3)
@given(content=checkpoints)
def test_plain_values_and_tensors_come_back_from_a_file(folder, content):
    path = folder / "any.pt"
    write_checkpoint(path, content)
    assert same(read_checkpoint(path, list(content), "train.py"), content)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path, [*content, "one more key"], "train.py")
    assert one_line(caught.value).startswith(str(path)) and "one more key" in str(caught.value)


@given(data=st.data(), model=models())
def test_a_model_of_any_settings_comes_back_from_a_file(folder, data, model):
    path = folder / "model.pt"
    write_checkpoint(path, {"settings": model.settings, "model": model.state_dict()})
    checkpoint = read_checkpoint(path, ["settings", "model"], "train.py")
    assert same(checkpoint["settings"], model.settings)
    twin = rebuild(lambda **settings: Transformer(**settings).double(), checkpoint, path)
    assert all(map(torch.equal, model.parameters(), twin.parameters())) and not twin.training
    src, tgt = data.draw(sources(2)), data.draw(ids(2, MAX_LEN))
    assert torch.equal(twin(src, tgt), model(src, tgt))


@times(10)
@given(data=st.data(), content=checkpoints)
def test_a_damaged_file_is_refused_in_one_line_or_loads_as_it_was(folder, data, content):
    """Cut anywhere, or any one byte changed: in the data too, which torch.load alone would take as it is."""
    path = folder / "damaged.pt"
    write_checkpoint(path, content)
    whole = path.read_bytes()
    place, change = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    path.write_bytes(whole[:place] + (bytes([whole[place] ^ change]) + whole[place + 1 :] if change else b""))
    try:
        found = read_checkpoint(path, (), "train.py")
    except CheckpointError as error:
        assert one_line(error).startswith(str(path))
    else:
        assert same(found, content)


# -------------------------------------------------------------------------- toolbox: numbers, names of files


digits = st.text("0123456789_+-.einfa ", max_size=9)
numbers = (
    st.integers().map(str) | st.floats().map(str) | st.text() | st.text("0123456789_+-.einfaE ", max_size=9)
)


def pairs_up_to(most):
    """[low, high]."""
    return st.lists(st.integers(-999, most), min_size=2, max_size=2).map(sorted)


@times(10)
@given(text=numbers, limits=pairs_up_to(10**9))
@example("9" * 5000, [0, 10**9])
@example("1\n", [0, 2])
def test_a_whole_number_is_inside_the_limits_or_refused_with_both(text, limits):
    low, high = limits
    try:
        value = integer(low, high)(text)
    except argparse.ArgumentTypeError as error:
        assert f"at least {low} and at most {high}" in one_line(error)
        with contextlib.suppress(ValueError):
            assert not low <= int(text) <= high
    else:
        assert type(value) is int and value == int(text) and low <= value <= high


@times(10)
@given(
    text=numbers,
    limits=st.tuples(st.integers(-999, 999), st.integers(-999, 999)).map(sorted),
    above=st.booleans(),
)
@example("nan", [0, 1], False)
@example("0", [0, 1], True)
def test_a_number_is_inside_the_limits_or_refused_with_both(text, limits, above):
    low, high = limits
    inside = (lambda x: low < x <= high) if above else (lambda x: low <= x <= high)
    assume(low < high or not above)
    try:
        value = number(low, high, open_start=above)(text)
    except argparse.ArgumentTypeError as error:
        assert f"{'above' if above else 'at least'} {low} and at most {high}" in one_line(error)
        with contextlib.suppress(ValueError):
            assert not inside(float(text))
    else:
        assert type(value) is float and value == float(text) and inside(value)


# Any name that the system itself takes, the longest ones too.
names = (
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=255)
    .filter(lambda name: name not in (".", "..") and len(name.encode()) <= 255)
)  # fmt: skip


@times(5)
@given(name=names, old=st.none() | st.binary(max_size=9), new=st.binary(max_size=9),
       kind=st.sampled_from(list(KINDS)), fails=st.booleans())  # fmt: skip
@example("x" * 255, None, b"new", "picture", False)
@example("a[b]*.unfinished", b"PK", b"new", "checkpoint", False)
def test_a_file_that_may_be_written_is_written_whole_or_stays_what_it_was(name, old, new, kind, fails):
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / name
        if old is not None:
            path.write_bytes(old)
        try:
            check_output("--out", path, kind)
        except FileError as error:
            assert str(error).startswith(f"--out {path}: ")
            assert one_line(ValueError(str(error).removeprefix(f"--out {path}: ")))
            assert (old and not KINDS[kind](old)) or len(unfinished(path).name.encode()) > 255
            return
        assert not old or KINDS[kind](old)
        with contextlib.suppress(ZeroDivisionError):
            with replacing(path) as file:
                file.write(new)
                if fails:
                    raise ZeroDivisionError
        left = {file.name: file.read_bytes() for file in Path(made).iterdir()}
        expected = old if fails else new
        assert left == ({} if expected is None else {name: expected})
