"""The live page: its model is PyTorch's, it shows what was computed, and it holds up under its readers.

The tests in a browser need Chromium. Without one they are skipped, unless REQUIRE_BROWSER is set.
"""

import base64
import functools
import json
import os
import re

import pytest
import torch
from processes import ROOT

import train
import viz
from model import Transformer, scaled_dot_product_attention
from page import build, unmasked
from page.faults import FAULTS, exact_share, forced_share, heads_of, next_token_weights, with_faults
from train import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    RECIPES,
    SEQ_LEN,
    TEST_SEED,
    TEST_SIZE,
    TRAIN_SEED,
    VOCAB,
    drop_seen,
    evaluating,
    make_dataset,
    token_name,
)

PAGE = ROOT / "docs" / "index.html"
TEXT = PAGE.read_text(encoding="utf-8")


def parts_of(text: str) -> tuple[dict, list[str]]:
    """A page -> its data and its weights."""
    data = re.search(r'<script type="application/json" id="data">\n(.*?)\n</script>', text, re.S)[1]
    return json.loads(data), re.findall(
        r'<script type="text/plain" class="weights">(.*?)</script>', text, re.S
    )


DATA, WEIGHTS = parts_of(TEXT)
TOLERANCE = 1e-3


def model_of(number: int) -> Transformer:
    """The model that the page holds, in PyTorch."""
    model = Transformer(VOCAB, VOCAB, **DATA["models"][number]["settings"])
    build.decode_weights(model, DATA["models"][number]["shapes"], WEIGHTS[number])
    return model.eval()


MODEL, UNMASKED = model_of(0), model_of(1)


# ---------------------------------------------------------------------------------------- without a browser


@functools.cache
def all_unseen(recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    run = RECIPES[recipe]
    seen = make_dataset(run["samples"], TRAIN_SEED, run["extra_long"])[0]
    return drop_seen(*make_dataset(2 * TEST_SIZE, TEST_SEED), seen)


def unseen(recipe: str, count: int) -> list[torch.Tensor]:
    """The first strings that a recipe's model is tested on: src and tgt, each [count, SEQ_LEN]."""
    return [ids[:count] for ids in all_unseen(recipe)]


def test_the_page_holds_a_trained_model():
    assert exact_share(with_faults(MODEL), *unseen("chapter", 500)) >= 0.99
    assert DATA["models"][0]["run"] == dict(recipe="chapter", seed=0, epochs=10)
    assert DATA["models"][0]["parameters"] == sum(p.numel() for p in MODEL.parameters())


@pytest.mark.slow
def test_figures_of_the_page_are_its_models():
    """Measured again, all but most of the heads; a string more or less is another machine's rounding."""
    for described, model, faults, names in (
        (DATA["models"][0], MODEL, set(), ["", *FAULTS]),
        (DATA["models"][1], UNMASKED, {"causal"}, ["", "causal"]),
    ):
        strings = unseen(described["run"]["recipe"], described["scored"])
        assert list(described["shares"]) == names and len(strings[0]) == described["scored"] == 2000
        for name in names:
            faulty = with_faults(model, faults ^ ({name} - {""}))
            cached = "causal" not in faulty.faults  # without a cache a quarter of the strings must do
            found = exact_share(faulty, *(ids[: 2000 if cached else 500] for ids in strings))
            assert found == pytest.approx(described["shares"][name], abs=0.001 if cached else 0.005), name
        trained = with_faults(model, faults)
        assert forced_share(trained, *strings) == pytest.approx(described["forced"], abs=1e-4)
        peek, weights = described["peek"], next_token_weights(trained, *strings)
        assert weights[peek["layer"] - 1, peek["head"] - 1].item() == pytest.approx(peek["weight"], abs=1e-4)
        assert weights.max().item() == pytest.approx(peek["weight"], abs=1e-4)
    heads, strings = DATA["models"][0]["heads"], [ids[:500] for ids in unseen("chapter", 500)]
    assert list(heads) == heads_of(MODEL)
    for name in ("decoder.1.2", "cross.2.1"):
        found = exact_share(with_faults(MODEL, off=[name]), *strings)
        assert found == pytest.approx(heads[name], abs=0.0021), name


def test_all_but_the_weights_is_the_template_s():
    assert TEXT == build.fill(DATA, WEIGHTS)


def test_the_page_is_one_small_file_that_refers_to_nothing():
    assert len(TEXT.encode()) < 5.5e6 and len(WEIGHTS) == 2
    rest = build.fill(DATA, [])
    assert not re.search(
        r"https?:|//\w+\.|@import|url\(|\bfetch\b|XMLHttpRequest|WebSocket|import\(|<iframe", rest
    )
    assert set(re.findall(r'(?:src|href)="([^"]*)"', rest)) == {"data:,"}
    assert "default-src 'none'" in rest


def test_weights_survive_the_way_into_the_page():
    torch.manual_seed(0)
    model = Transformer(VOCAB, VOCAB, d_model=8, num_heads=2, dff=6, num_layers=1, max_len=SEQ_LEN)
    build.round_weights(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shapes, text = build.encode_weights(model)
    other = Transformer(VOCAB, VOCAB, d_model=8, num_heads=2, dff=6, num_layers=1, max_len=SEQ_LEN)
    build.decode_weights(other, shapes, text)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_page_is_built_and_built_again(tmp_path, monkeypatch, capsys):
    """By the commands, from models of one update each; without the second model, and over the first page."""
    for name in ("chapter", "fast"):
        few = dict(epochs=1, samples=64, batch_size=64, warmup=1)
        monkeypatch.setitem(train.RECIPES, name, train.RECIPES[name] | few)
    monkeypatch.setattr(train, "D_MODEL", 8)
    for module in (train, build):
        monkeypatch.setattr(module, "TEST_SIZE" if module is train else "SCORED", 20)
    monkeypatch.setattr(unmasked, "SCORED", 20)
    monkeypatch.chdir(tmp_path)
    assert train.main([]) == 0 and unmasked.main(["--seed", "3"]) == 0
    for options, count in (([], 1), (["--unmasked", "unmasked.pt"], 2), ([], 1)):
        assert viz.main(["--html", "a.html", "--digits", "4 7 1 1", *options]) == 0
        text = (tmp_path / "a.html").read_text(encoding="utf-8")
        assert "wrote a.html" in capsys.readouterr().out
        data, weights = parts_of(text)
        assert text == build.fill(data, weights) and len(data["models"]) == len(weights) == count
        assert data["digits"] == "4711" and data["models"][-1]["scored"] == 20
    assert data["models"][0]["run"] == dict(recipe="chapter", seed=0, epochs=1)
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", train.CHECKPOINT, unmasked.CHECKPOINT}


def test_the_second_model_sees_the_future():
    run = RECIPES["fast"] | dict(recipe="fast", seed=0, samples=64, epochs=1, warmup=1)
    model, history, _ = unmasked.train_unmasked(run)
    plain = train.make_model(run)
    assert model.faults == {"causal"} and len(history) == 1
    src, tgt = unseen("fast", 4)
    changed = tgt[:, :-1].clone()
    changed[:, -1] = 5
    with evaluating(model):
        assert not torch.equal(model(src, tgt[:, :-1])[:, 0], model(src, changed)[:, 0])
    with evaluating(plain):
        assert torch.equal(plain(src, tgt[:, :-1])[:, 0], plain(src, changed)[:, 0])


def everything(model: Transformer, src: torch.Tensor, tgt_in: torch.Tensor) -> torch.Tensor:
    """src [n, 14], tgt_in [n, 13] -> [n, all]: logits, then each layer's maps: encoder, decoder, cross."""
    with evaluating(model):
        mask = model.padding_mask(src)
        memory, encoder = model.encoder(src, mask)
        x, decoder, cross = model.decoder(tgt_in, memory, model.self_mask(tgt_in), mask)
        parts = [model.out_proj(x), *encoder, *decoder, *cross]
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def test_no_fault_is_the_model_itself_and_every_fault_changes_it():
    src, tgt = unseen("chapter", 20)
    tgt_in = tgt[:, :-1]
    healthy = everything(with_faults(MODEL), src, tgt_in)
    with evaluating(MODEL):
        torch.testing.assert_close(healthy[:, : 13 * VOCAB], MODEL(src, tgt_in).flatten(1))
    for fault in FAULTS:
        assert (everything(with_faults(MODEL, [fault]), src, tgt_in) - healthy).abs().max() > 0.1, fault
    for head in heads_of(MODEL):
        assert (everything(with_faults(MODEL, off=[head]), src, tgt_in) - healthy).abs().max() > 0.01, head


# --------------------------------------------------------------------------------------------- in a browser


@pytest.fixture
def page(browser):
    """The committed page as it is when it has just been opened, in a window of 1280 x 800."""
    browser.size(1280, 800)
    if browser.evaluate("location.href.replace(/#.*/, '')") != PAGE.as_uri():
        browser.open(PAGE.as_uri())
    browser.events.clear()
    go_to(browser, "")
    yield browser
    assert browser.complaints() == []


def go_to(browser, fragment: str) -> None:
    """Change what stands behind # in the address, as a link does."""
    browser.evaluate(f"""new Promise(resolve => {{
        const wanted = {json.dumps("#" + fragment)};
        if (location.hash === wanted || location.hash + "#" === wanted) resolve(read_address());
        addEventListener("hashchange", () => setTimeout(resolve, 0), {{ once: true }});
        location.hash = wanted;
    }})""")


EVERYTHING = """(() => {
    const model = MODELS[NUMBER](new Set(FAULTS), new Set(OFF)), all = [];
    for (const [src, tgt_in] of PAIRS) {
        const [memory, src_mask, encoder] = model.encode(src);
        const [logits, decoder, cross] = model.decode(tgt_in, memory, src_mask);
        all.push(...logits);
        for (const layers of [encoder, decoder, cross])
            for (const heads of layers) for (const { weights } of heads) all.push(...weights);
    }
    const numbers = Float32Array.from(all.flatMap(row => [...row])), bytes = new Uint8Array(numbers.buffer);
    let text = "";
    for (let i = 0; i < bytes.length; i += 32768)
        text += String.fromCharCode(...bytes.subarray(i, i + 32768));
    return btoa(text);
})()"""
TOKENS = """STRINGS.map(src => greedy_decode(MODELS[NUMBER](new Set(FAULTS), new Set(OFF)), src).ids)"""


def ask(browser, script: str, faults=(), off=(), number=0, **values):
    """The value of a script in which the words in capitals are replaced."""
    for name, value in dict(FAULTS=list(faults), OFF=list(off), NUMBER=number, **values).items():
        script = re.sub(rf"\b{name}\b", json.dumps(value), script)
    return browser.evaluate(script)


def check_numbers(browser, count: int, faults=(), off=(), model=MODEL, number=0) -> None:
    """The page's logits and maps on so many strings are PyTorch's, right answer read."""
    src, tgt = unseen("chapter", count)
    text = ask(
        browser,
        EVERYTHING,
        faults,
        off,
        number,
        PAIRS=[*zip(src.tolist(), tgt[:, :-1].tolist(), strict=True)],
    )
    found = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).view(count, -1)
    expected = everything(with_faults(model, faults, off), src, tgt[:, :-1])
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < TOLERANCE


def check_tokens(browser, count: int, faults=(), off=(), model=MODEL, number=0) -> None:
    """The page's own answers are those of PyTorch, everything padded alike."""
    src, _ = unseen("chapter", count)
    strings = [[i for i in row if i != PAD_ID] for row in src.tolist()]
    found = ask(browser, TOKENS, faults, off, number, STRINGS=strings)
    faulty = with_faults(model, faults, off)
    with evaluating(faulty):
        memory, mask = faulty.encode(src)
        ids = torch.full((count, SEQ_LEN), PAD_ID)
        ids[:, 0] = BOS_ID
        for t in range(SEQ_LEN - 1):
            logits = faulty.decode(ids[:, :-1], memory, mask)[0][:, t, EOS_ID:]
            ended = (ids == EOS_ID).any(1)
            ids[:, t + 1] = (logits.argmax(-1) + EOS_ID).masked_fill(ended, PAD_ID)
    assert found == [[i for i in row if i != PAD_ID] for row in ids.tolist()]


BROKEN = [(), *((fault,) for fault in FAULTS), FAULTS]


@pytest.mark.parametrize("faults", BROKEN, ids=lambda faults: "+".join(faults) or "none")
def test_numbers_and_tokens_are_pytorch_s(faults, page):
    check_numbers(page, 200 if len(faults) < 2 else 20, faults)
    check_tokens(page, 8, faults)


def test_heads_switched_off_and_the_second_model_are_pytorch_s(page):
    check_numbers(page, 5, off=heads_of(MODEL)[::5])
    check_tokens(page, 5, off=heads_of(MODEL)[::5])
    check_numbers(page, 20, ["causal"], model=UNMASKED, number=1)
    check_tokens(page, 5, ["causal"], model=UNMASKED, number=1)


MAP = """(() => {
    const table = document.getElementById("map"), rows = [...table.tBodies[0].rows];
    const text = cell => cell.textContent, label = element => element.getAttribute("aria-label");
    const map = map_of(current(), step_of(current()), state.kind, state.layer, state.head);
    return {
        name: label(table), axes: text(document.getElementById("axes")),
        columns: [...table.tHead.rows[0].cells].slice(1).map(text),
        rows: rows.map(row => text(row.cells[0])),
        cells: rows.map(row => [...row.cells].slice(1).map(text)),
        says: rows.map(row => [...row.cells].slice(1).map(label)),
        sums: map.rows.map(row => row.weights.reduce((a, b) => a + b)),
    };
})()"""


def check_display(browser, digits: str, kind: str, layer: int, head) -> None:
    """The large map shows PyTorch's weights in PyTorch's places, under the right names."""
    view = json.dumps(dict(digits=digits, kind=kind, layer=layer, head=head))
    browser.evaluate(f"change({{...start(), ...{view}}})")
    shown = browser.evaluate(MAP)
    weights, rows, columns, output = viz.attention_maps(MODEL, digits, kind)
    expected = weights[layer - 1].mean(0) if head == "mean" else weights[layer - 1, head - 1]
    writes = [*output, "<eos>"]
    assert output == digits[::-1]  # a string for which this is so was chosen
    assert shown["columns"] == columns
    names = (
        rows if kind == "encoder" else [f"{row} → {write}" for row, write in zip(rows, writes, strict=True)]
    )
    assert shown["rows"] == names
    asks = "source (asks)" if kind == "encoder" else "has read → writes next (asks)"
    looked = "answer so far (looked at)" if kind == "decoder" else "source (looked at)"
    assert shown["axes"] == f"Row: {asks} · Column: {looked}"
    assert f"layer {layer} of 2" in shown["name"]
    assert shown["sums"] == pytest.approx([1] * len(rows), abs=1e-5)
    for i, cells in enumerate(shown["cells"]):
        for j, text in enumerate(cells):
            assert float(text) == pytest.approx(expected[i, j].item(), abs=0.005 + TOLERANCE), (i, j)
            hidden = kind == "decoder" and j > i
            assert (text == "0") == hidden and ("masked" in shown["says"][i][j]) == hidden
            assert f"looks {'not ' if hidden else ''}at {columns[j]}" in shown["says"][i][j]
            if kind != "encoder":
                assert shown["says"][i][j].startswith(f"To write {writes[i]} after {rows[i]}, ")


@pytest.mark.parametrize("kind", ["cross", "encoder", "decoder"])
def test_what_is_shown_is_what_was_computed(kind, page):
    check_display(page, "7309518", kind, 2, "mean")
    check_display(page, "314159265358", kind, 1, 3)


MUTANTS = {  # what is broken in the page -> the text, what replaces it, the check that must see it
    "heads swapped": ("(Q[head], K[head], V[head],",
                      "(Q[3 - head], K[3 - head], V[3 - head],", check_numbers),
    "tanh GELU": ("0.5 * x * (1 + erf(x / Math.SQRT2))",
                  "0.5 * x * (1 + Math.tanh(0.7978845608 * (x + 0.044715 * x ** 3)))", check_numbers),
    "sqrt(d_k) missing": ("scale = Math.sqrt(q[0].length)", "scale = 1", check_numbers),
    "axes swapped": ("one.weights[i][j]", "one.weights[j][i]", check_display),
    "labels shifted by one": ("token_name(result.ids[i + 1])", "token_name(result.ids[i])", check_display),
    "columns shifted by one": ("columns: columns.slice(0, shown)",
                               "columns: columns.slice(1, shown + 1)", check_display),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_page_that_is_wrong_is_seen_to_be(name, browser, tmp_path):
    right, wrong, check = MUTANTS[name]
    assert TEXT.count(right) == 1
    (tmp_path / "mutant.html").write_text(TEXT.replace(right, wrong), encoding="utf-8")
    browser.open((tmp_path / "mutant.html").as_uri())
    arguments = [5] if check is check_numbers else ["7309518", "cross", 2, "mean"]
    with pytest.raises(AssertionError):
        check(browser, *arguments)


CELL = "[document.activeElement.dataset.row, document.activeElement.dataset.column].map(Number)"
SHOWN = "[...document.querySelectorAll('#answer button')].map(button => button.textContent).join(' ')"


TABLE = """[...document.querySelectorAll("%s tbody tr")].map(row =>
    [...row.cells].map(cell => cell.textContent))"""


def text_of(browser, name: str) -> str:
    return browser.evaluate(f"document.getElementById('{name}').textContent")


def test_inside_one_cell_the_numbers_lead_from_q_and_k_to_the_weight(page, monkeypatch):
    page.evaluate("change({kind: 'cross', layer: 2, head: 2, row: 1, column: 5})")
    src, tgt_in = torch.tensor([[10, 6, 3, 12, 8, 4, 11, 2]]), torch.tensor([[1, 11, 4, 8, 12, 3, 6, 10]])
    kept = {}

    def spy(q, k, *others):
        kept.update(q=q, k=k)
        return scaled_dot_product_attention(q, k, *others)

    monkeypatch.setattr(MODEL.decoder.layers[1].cross_mha, "attend", spy)
    with evaluating(MODEL):
        MODEL(src, tgt_in)
    q, k = kept["q"][0, 1, 1], kept["k"][0, 1]
    product, scores = (q @ k[5]).item(), k @ q / 32**0.5
    weight = scores.softmax(0)[5].item()
    text = page.evaluate("document.getElementById('cell-steps').innerText").replace("−", "-")
    said = [float(re.search(pattern, text)[1]) for pattern in (r"q·k = (-?[\d.]+)", r"÷ 5\.66 = (-?[\d.]+)")]
    assert said == pytest.approx([product, product / 32**0.5], abs=0.006)
    table = page.evaluate("[...document.querySelectorAll('#cell-steps table')].at(-1).tBodies[0].innerText")
    rows = [line.split("\t") for line in table.replace("−", "-").strip().splitlines()]
    assert [row[0] for row in rows] == ["7", "3", "0", "9", "5", "1", "8", "<eos>"]
    assert [float(row[1]) for row in rows] == pytest.approx(scores.tolist(), abs=0.006)
    assert float(rows[5][3]) == pytest.approx(weight, abs=0.0011)
    numbers = page.evaluate(TABLE % "#cell-steps details")
    assert [float(row[1].replace("−", "-")) for row in numbers] == pytest.approx(q.tolist(), abs=0.001)
    assert [float(row[2].replace("−", "-")) for row in numbers] == pytest.approx(k[5].tolist(), abs=0.001)


def test_steps_by_the_keyboard_alone(page):
    assert page.evaluate(SHOWN) == "8 1 5 9 0 3 7 <eos>" and text_of(page, "verdict").startswith("✓")
    page.evaluate("document.getElementById('digits').focus()")
    ids = []
    for _ in range(30):
        page.key("Tab", windowsVirtualKeyCode=9)
        ids.append(page.evaluate("document.activeElement.id || document.activeElement.dataset.row"))
        if ids[-1] == "first":
            break
    page.key("Enter", "\r", windowsVirtualKeyCode=13)
    assert page.evaluate(SHOWN) == "8 · · · · · · ·" and "Step 1 of 8: writes 8, looks at 8" in text_of(
        page, "announce"
    )
    assert page.evaluate("document.activeElement.id") == "next"
    page.key("Enter", "\r", windowsVirtualKeyCode=13)
    assert page.evaluate(SHOWN) == "8 1 · · · · · ·"
    assert page.evaluate("document.querySelectorAll('#map [tabindex=\"0\"]').length") == 1
    for _ in range(10):
        page.key("Tab", windowsVirtualKeyCode=9)
        if page.evaluate("document.activeElement.matches('#map td')"):
            break
    assert page.evaluate(CELL) == [1, 5]
    for key, code, place in (
        ("ArrowRight", 39, [1, 6]), ("ArrowUp", 38, [0, 6]), ("ArrowUp", 38, [0, 6]), ("Home", 36, [0, 0]),
        ("ArrowLeft", 37, [0, 0]), ("End", 35, [0, 7]), ("ArrowDown", 40, [1, 7]), ("ArrowDown", 40, [1, 7]),
    ):  # fmt: skip
        page.key(key, windowsVirtualKeyCode=code)
        assert page.evaluate(CELL) == place, key
    assert text_of(page, "reading") == "To write 1 after 8, it looks at <eos> with weight 0.00."
    page.key("Tab", windowsVirtualKeyCode=9)
    assert not page.evaluate("document.activeElement.matches('#map td')")


def type_digits(browser, text: str) -> None:
    browser.evaluate("document.getElementById('digits').focus(), document.getElementById('digits').select()")
    browser.send("Input.insertText", text=text) if text else browser.key("Delete", windowsVirtualKeyCode=46)


@pytest.mark.parametrize(
    "text, complaint, answer",
    [
        ("12345", "", "5 4 3 2 1 <eos>"),
        (" 1, 2,3 ４", "", "4 3 2 1 <eos>"),
        ("12a45", "“a” is no digit", "8 1 5 9 0 3 7 <eos>"),
        ("<b>", "“<” is no digit", "8 1 5 9 0 3 7 <eos>"),
        ("", "Type a digit", "8 1 5 9 0 3 7 <eos>"),
        ("7" * 13, "13 digits: the model has positions for 12", "8 1 5 9 0 3 7 <eos>"),
        ("7" * 40, "40 digits: the model has positions for 12", "8 1 5 9 0 3 7 <eos>"),
        ("7", "1 digit: training had 3 to 12", None),
    ],
)
def test_what_is_typed(text, complaint, answer, page):
    type_digits(page, text)
    said = text_of(page, "complaint")
    assert complaint in said and bool(said) == bool(complaint)
    if answer:
        assert page.evaluate(SHOWN) == answer
    assert len(page.evaluate(MAP)["cells"]) == len(page.evaluate("current().steps"))


@pytest.mark.parametrize(
    "fragment, left_out",
    [
        (
            "digits=4711&step=2&kind=decoder&layer=1&head=3&cell=2.1&faults=causal,scale&off=cross.2.1&padding=shown",
            "",
        ),
        ("model=unmasked", ""),
        ("digits=12x", "digits=12x"),
        ("digits=" + "1" * 40, "digits=111"),
        ("digits=", "digits="),
        ("step=99", "step=99"),
        ("step=-1&head=5&layer=0", "step=-1, head=5, layer=0"),
        ("kind=toString&faults=constructor", "kind=toString, faults=constructor"),
        ("cell=1&cell=1.2.3&cell=a.b", "cell=1, cell=1.2.3, cell=a.b"),
        ("off=cross.9.9&model=3&__proto__=1", "off=cross.9.9, model=3, __proto__=1"),
        ("%E0%A4%A&=&&<img src=x onerror=alert(1)>", "="),
    ],
)
def test_addresses(fragment, left_out, page):
    page.open(f"{PAGE.as_uri()}#{fragment}") if "4711" in fragment else go_to(page, fragment)
    assert page.evaluate("document.getElementById('trouble').hidden") == (not left_out)
    assert left_out in text_of(page, "trouble") and page.evaluate(SHOWN)
    if not left_out:  # the same view is sent on
        assert set(page.evaluate("location.hash").lstrip("#").split("&")) == set(fragment.split("&"))
    if "4711" in fragment:
        assert page.evaluate(SHOWN).startswith("1 1 ·") and page.evaluate("state.step") == 1
        assert "causal mask" in text_of(page, "broken") and "layer 2, head 1" in text_of(page, "broken")


def test_switches_change_all_above_and_can_be_taken_back(page):
    page.evaluate("new Promise(resolve => setTimeout(resolve, 50))")
    page.evaluate("document.getElementById('faults.padding').click()")
    expected = with_faults(MODEL, ["padding"])
    src = torch.tensor([[10, 6, 3, 12, 8, 4, 11, 2, 0, 0, 0, 0, 0, 0]])
    ids = viz.greedy_decode(expected, src, SEQ_LEN)[0, 1:].tolist()
    assert page.evaluate(SHOWN) == " ".join(map(token_name, ids)) and text_of(page, "verdict").startswith("✗")
    assert page.evaluate(MAP)["columns"] == ["7", "3", "0", "9", "5", "1", "8", "<eos>"] + ["<pad>"] * 6
    assert page.evaluate("document.activeElement.id || 'faults.padding'") == "faults.padding"
    page.evaluate("document.getElementById('repair').click()")
    assert page.evaluate(SHOWN) == "8 1 5 9 0 3 7 <eos>" and page.evaluate(
        "document.getElementById('broken').hidden"
    )
    page.evaluate("""new Promise(resolve => {
        const wait = () => document.getElementById("swap") ? resolve() : setTimeout(wait, 20);
        wait();
    })""")  # the rows are computed one by one, the second model last
    table = page.evaluate(TABLE % "#faults")
    shares = [row[-1].replace("\u00a0", " ") for row in table]
    assert shares == [f"{round(100 * share, 2):g} %" for share in DATA["models"][0]["shares"].values()]
    boxes = page.evaluate("""[...document.querySelectorAll(".thumb")].map(thumb =>
        [thumb.querySelector("input").id, thumb.innerText])""")
    assert sorted(box for box, _ in boxes) == sorted(f"off.{name}" for name in heads_of(MODEL))
    for box, text in boxes:
        share = DATA["models"][0]["heads"][box.removeprefix("off.")]
        assert f"off: {round(100 * share, 2):g}\u00a0%" in text
    assert table[2][1] == "✗ " + " ".join(map(token_name, ids))
    assert text_of(page, "forced") == "✓ 8 1 5 9 0 3 7 <eos>" and text_of(page, "alone").startswith("✗")


@pytest.mark.parametrize("width", [1280, 390, 320])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_width_and_contrast(width, dark, page):
    page.size(width, 844, dark)
    page.evaluate("change({...start(), digits: '314159265358'})")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cells = page.evaluate("""[...document.querySelectorAll("#map td[data-row]")].map(cell => {
        const { width, height } = cell.getBoundingClientRect(), style = getComputedStyle(cell);
        return [width, height, style.color, style.backgroundColor];
    })""")
    assert len(cells) == 13 * 13 and min(min(cell[:2]) for cell in cells) >= 24
    if width == 390:
        box = page.evaluate(
            "(box => [box.scrollWidth, box.clientWidth])(document.querySelector('#large .scroll'))"
        )
        assert box[0] <= box[1]  # twelve digits need no scrolling
    ground = page.evaluate("getComputedStyle(document.querySelector('#large')).backgroundColor")
    assert (luminance(ground) < 0.1) == dark
    for *_, colour, background in cells:
        lights = sorted([luminance(colour), luminance(ground if background.endswith(", 0)") else background)])
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5, (colour, background)


def luminance(colour: str) -> float:
    """ "rgb(1, 2, 3)" -> relative luminance (WCAG 2)."""
    parts = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("width, dark", [(1280, False), (1280, True), (390, False), (390, True)])
def test_axe_finds_nothing(width, dark, page):
    """Only where AXE names axe-core's script (npm install axe-core; node_modules/axe-core/axe.min.js)."""
    if "AXE" not in os.environ:
        pytest.skip("needs axe-core, its axe.min.js named by the variable AXE")
    page.size(width, 844, dark)
    go_to(page, "faults=causal")
    with open(os.environ["AXE"], encoding="utf-8") as file:
        page.evaluate(file.read() + ";0")
    page.evaluate("new Promise(resolve => setTimeout(resolve, 1500))")
    found = page.evaluate("""axe.run().then(({ violations }) =>
        violations.map(({ id, nodes }) => [id, nodes.map(node => node.html.slice(0, 200))]))""")
    assert found == []
