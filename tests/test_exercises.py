"""The exercises on tiny sizes: each variant differs in the named thing alone, results can be made again."""

import json
import shutil

import pytest
import torch
from processes import ENCODING, ROOT, STRICT, own_warnings, run_python

import train
from exercises import (
    causal_cross,
    common,
    dot_products,
    exposure_bias,
    initialisation,
    length_generalisation,
    pictures,
    positions,
    run,
    sorting,
    swiglu,
    timing,
    torch_stacks,
)
from exercises.common import run_of, strings_of_length
from model import KVCache, attention_weights

VARIANTS = {v.name: v for exercise in run.EXERCISES.values() for v in exercise.variants}
TINY = dict(samples=64, batch_size=16, warmup=2)


@pytest.fixture(scope="module", autouse=True)
def tiny():
    """A model of width 16, four updates an epoch, a few strings to score."""
    with pytest.MonkeyPatch.context() as patch:
        for name, epochs in (("chapter", 2), ("fast", 1)):
            patch.setitem(train.RECIPES, name, train.RECIPES[name] | TINY | dict(epochs=epochs))
        for module, name, value in (
            (train, "D_MODEL", 16),
            (train, "TEST_SIZE", 20),
            (train, "VAL_SCORED", 20),
            (common, "LONGEST", 14),
            (common, "PER_LENGTH", 2),
            (length_generalisation, "LONGEST", 14),
            (length_generalisation, "PER_LENGTH", 2),
            (causal_cross, "STRINGS", 4),
            (exposure_bias, "STRINGS", 4),
            (dot_products, "STRINGS", 4),
            (timing, "LENGTHS", (4, 8)),
            (timing, "SHORT", 4),
            (timing, "REPEATS", 2),
        ):
            patch.setattr(module, name, value)
        yield


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """`--all`, fast recipe, seed 0 -> folder with results/ and pictures/, and each variant's batches."""
    folder = tmp_path_factory.mktemp("exercises")
    (folder / "results").mkdir(), (folder / "pictures").mkdir()
    seen, steps, honest_train, honest_step = {}, [], run.train_variant, train.train_step

    def train_variant(variant, *args, **options):
        steps.clear()
        model = honest_train(variant, *args, **options)
        seen.setdefault(variant.name, list(steps))
        return model

    def train_step(model, optimizer, scheduler, src, tgt, *args):
        steps.append((src, tgt))
        return honest_step(model, optimizer, scheduler, src, tgt, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "train_variant", train_variant)
        patch.setattr(train, "train_step", train_step)
        assert run.main(["--all", "--recipe", "fast", "--seeds", "0", *folders(folder)]) == 0
    return folder, seen


def folders(folder):
    return ["--results", str(folder / "results"), "--pictures", str(folder / "pictures")]


@pytest.fixture
def empty(tmp_path):
    (tmp_path / "results").mkdir(), (tmp_path / "pictures").mkdir()
    return tmp_path


def result(folder, name, recipe="fast", seed=0):
    return folder / "results" / f"{name}.{recipe}.{seed}.json"


def fresh(name):
    """The variant's model before training."""
    return VARIANTS[name].model(run_of(VARIANTS[name], "fast", 0))


# ------------------------------------------------------------------------------------------ every exercise


def test_every_exercise_leaves_results_and_pictures(whole):
    folder, _ = whole
    for name, exercise in run.EXERCISES.items():
        assert (folder / "pictures" / f"exercise_{name}_detail.png").exists() == (exercise.draw is not None)
        summary = folder / "pictures" / f"exercise_{name}.png"
        assert summary.exists() == (exercise.summary and exercise.variants != ())
        ending = "-measured.fast.0.json" if exercise.variants else "-measured.json"
        assert (folder / "results" / f"{name}{ending}").exists() == (exercise.measure is not None)
    for name in VARIANTS:
        document = json.loads(result(folder, name).read_text(encoding="utf-8"))
        assert document["variant"] == name and document["run"]["seed"] == 0 and document["history"]
        assert 0 <= document["exact_match"] <= 1 and list(document["longer"]) == ["13", "14"]
        assert "seconds" not in result(folder, name).read_text(encoding="utf-8")
    lines = (folder / "results" / "seconds.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(VARIANTS) and set(common.read_seconds(folder / "results")) == {
        f"{name}.fast.0" for name in VARIANTS
    }


CHANGED_SETTINGS = {
    "no-positions": {"max_len"}, "learned-positions": {"max_len"}, "rotary-positions": {"max_len"},
    "randomised-positions": {"max_len"}, "heads-1": {"num_heads"}, "heads-2": {"num_heads"},
    "heads-8": {"num_heads"}, "layers-2-post": {"norm_first"}, "layers-2-post-warmup-1": {"norm_first"},
    "layers-6-pre": {"num_layers"}, "layers-6-pre-warmup-1": {"num_layers"},
    "layers-6-post": {"num_layers", "norm_first"}, "layers-6-post-warmup-1": {"num_layers", "norm_first"},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_options_and_data_are_the_recipes_but_for_the_named_thing(name, whole):
    folder, seen = whole
    recipe, ours = (json.loads(result(folder, n).read_text(encoding="utf-8")) for n in ("recipe", name))
    changed = {key for key in recipe["run"] if recipe["run"][key] != ours["run"][key]}
    assert changed == ({"warmup"} if "warmup-1" in name else {"samples"} if name == "early" else set())
    settings = {key for key in recipe["model"] if recipe["model"][key] != ours["model"][key]}
    assert settings == CHANGED_SETTINGS.get(name, set())
    if name == "early":
        return
    assert len(seen[name]) == len(seen["recipe"]) == 4
    for (src, tgt), (other_src, other_tgt) in zip(seen["recipe"], seen[name], strict=True):
        assert torch.equal(src, other_src)  # the same strings in the same order: nothing else was drawn
        expected = sorting.sorted_answer(src, tgt) if name == "sort" else tgt
        assert torch.equal(expected, other_tgt)


def changed_weights(name):
    """Names of the weights that differ from the recipe's at the start; the set of names must be the same."""
    recipe, ours = fresh("recipe").state_dict(), fresh(name).state_dict()
    assert recipe.keys() == ours.keys()
    return {key for key in recipe if not torch.equal(recipe[key], ours[key])}


def test_initialisation_changes_the_named_weights_alone():
    embeddings = {"encoder.embed.emb.weight", "decoder.embed.emb.weight"}
    linear = {k for k in fresh("recipe").state_dict() if ".W_" in k or ".ffn." in k or k.startswith("out_")}
    expected = {"default": embeddings | linear, "default-embeddings": embeddings, "default-linear": linear}
    expected["default-unscaled"] = expected["default"]
    expected["default-embeddings-unscaled"] = embeddings
    assert {v.name for v in initialisation.EXERCISE.variants} == {"recipe", *expected}
    for name, keys in expected.items():
        assert changed_weights(name) == keys, name
        model = fresh(name)
        for embed in common.embeddings(model):
            assert embed.scale == (1.0 if name.endswith("unscaled") else 4.0)  # sqrt(16)
            assert torch.equal(embed.emb.weight[0], torch.zeros(16))
            std = embed.emb.weight[1:].std()
            assert (0.85 < std < 1.15) == ("default-linear" != name)
        bound = model.out_proj.weight.abs().max()
        assert (bound <= 16**-0.5 and model.out_proj.bias.any()) == ("embeddings" not in name)


@pytest.mark.parametrize(
    "name", ["heads-1", "heads-2", "heads-8", "layers-2-pre-warmup-1", "sort", "early", "causal-cross",
             "no-positions", "rotary-positions", "randomised-positions"],
)  # fmt: skip
def test_these_start_from_the_recipes_weights(name):
    assert changed_weights(name) == set()


def test_post_norm_starts_from_the_recipes_weights_without_the_last_norm():
    recipe, ours = fresh("recipe").state_dict(), fresh("layers-2-post").state_dict()
    assert {key for key in recipe.keys() - ours.keys()} == {
        f"{stack}.ln_final.{part}" for stack in ("encoder", "decoder") for part in ("weight", "bias")
    }
    assert all(torch.equal(recipe[key], ours[key]) for key in ours)


def test_positions():
    src = torch.tensor([[3, 4, 5, 2]])
    for embed in common.embeddings(fresh("no-positions").eval()):
        assert torch.equal(embed(src), embed.emb(src) * embed.scale)
    recipe, learned = fresh("recipe").state_dict(), fresh("learned-positions")
    extra = {"encoder.embed.pe", "decoder.embed.pe"}
    assert learned.state_dict().keys() - recipe.keys() == extra
    assert all(torch.equal(recipe[key], learned.state_dict()[key]) for key in recipe)
    assert extra <= {name for name, _ in learned.named_parameters()}
    rotary = fresh("rotary-positions")
    attend = {name: m.attend for name, m in rotary.named_modules() if name.endswith("mha")}
    assert len(attend) == 6 and all(
        (function is positions.rotary_attention) == ("cross" not in name) for name, function in attend.items()
    )


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_no_variant_makes_a_tensor_on_the_wrong_device(name):
    """On `meta`, which needs no hardware and mixes with nothing: in training, eval, and step by step."""
    model = fresh(name).to("meta")
    src, tgt = (ids.to("meta") for ids in strings_of_length(9, 3))
    assert model.train()(src, tgt[:, :-1]).is_meta
    common.lengthen(model)
    src, tgt = (ids.to("meta") for ids in strings_of_length(14, 3))
    with train.evaluating(model):
        memory, src_mask = model.encode(src)
        cache = KVCache(model.settings["num_layers"])
        for i in range(3):
            assert model.decode(tgt[:, i : i + 1], memory, src_mask, cache)[0].is_meta
    assert all(tensor.is_meta for tensor in model.buffers())


def test_measuring_makes_no_tensor_on_the_wrong_device():
    model = fresh("recipe").to("meta")
    src, _ = strings_of_length(9, 3)
    parts = dot_products.score_parts(model, src.to("meta"))
    assert all(part.is_meta for part in parts.values())
    timing.decode(model, *timing.encode(model, src.to("meta")), 2)
    assert torch_stacks.twin(model).out_proj.weight.is_meta


@pytest.mark.parametrize("option", ["results", "pictures"])
def test_a_gpus_results_do_not_come_to_stand_among_the_cpus(option, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "choose_device", lambda name: torch.device("cuda" if name != "cpu" else name))
    other = "pictures" if option == "results" else "results"
    for device in ("cuda", "auto"):
        with pytest.raises(SystemExit) as ended:
            run.main(["heads", "--device", device, f"--{other}", str(tmp_path)])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.count("\n") == 1 and f"--device cuda: --{option}" in error
    folders = [f"--{name}={tmp_path}" for name in ("results", "pictures")]
    assert run.parse_args(["heads", "--device", "cuda", *folders])[0].device.type == "cuda"
    assert run.parse_args(["heads", "--again"])[0].device == torch.device("cpu")  # unless asked for
    assert run.main(["--list", "--device", "cuda"]) == 0  # only reads


def test_the_device_reaches_training_and_measuring(tmp_path, monkeypatch):
    seen, honest = [], run.train_variant

    def train_variant(*args, **options):
        seen.append(str([*args, *options.values()][-1]))
        return honest(*args, **options)

    def measure(device):
        seen.append(str(device))
        return {}

    monkeypatch.setattr(run, "train_variant", train_variant)
    monkeypatch.setattr(run, "choose_device", lambda name: torch.device("cpu", 0))
    timed = run.EXERCISES["timing"]._replace(measure=measure, draw=None)
    monkeypatch.setitem(run.EXERCISES, "timing", timed)
    folders = [f"--{name}={tmp_path}" for name in ("results", "pictures")]
    assert run.main(["causal_cross", "timing", "--recipe", "fast", "--seeds", "0", *folders]) == 0
    assert len(seen) >= 5 and set(seen) == {"cpu:0"}


def test_scores_of_rotated_queries_and_keys_depend_on_their_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 5, 8).unbind(0)

    def scores(start):
        return positions.rotate(q, start) @ positions.rotate(k, start).transpose(-2, -1)

    torch.testing.assert_close(scores(0), scores(7), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(scores(0), q @ k.transpose(-2, -1), atol=1e-2)
    torch.testing.assert_close(positions.rotate(q, 3).norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize(
    "name", ["rotary-positions", "learned-positions", "randomised-positions", "causal-cross", "torch-stacks"]
)
def test_decoding_step_by_step_equals_decoding_anew(name):
    model = fresh(name).eval()
    common.lengthen(model)
    src, tgt = strings_of_length(16, 5)
    src = torch.cat([src, torch.zeros(5, 2, dtype=torch.long)], dim=1)
    src[0, 4:] = 0  # padding, too
    kept = train.greedy_decode(model, src, 17)
    assert torch.equal(kept, train.greedy_decode(model, src, 17, use_cache=False))
    with train.evaluating(model):
        whole = model(src, tgt[:, :-1])
        memory, src_mask = model.encode(src)
        cache = KVCache(model.settings["num_layers"])
        parts = [model.decode(tgt[:, i : i + 1], memory, src_mask, cache)[0] for i in range(17)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_randomised_positions_are_ordered_rows_of_a_larger_table():
    model = fresh("randomised-positions")
    source, answer = model.encoder.embed, model.decoder.embed
    ids, start = torch.full((6, 9), 5), torch.full((6, 10), 5)
    ids[3:, 6:] = 0  # three shorter strings
    for embed in (source, answer):
        embed.drop.p = 0.0

    def rows(embed, ids, *cache):
        content = embed.emb(ids) * embed.scale
        return torch.cdist(embed(ids, *cache) - content, embed.pe).argmin(-1)

    first, second = rows(source.train(), ids), rows(source, ids)
    assert (first[:3].diff(dim=1) > 0).all() and (first[3:, :6].diff(dim=1) > 0).all()
    assert first.max() < length_generalisation.RANGE
    assert len({tuple(row.tolist()) for row in torch.cat([first, second])}) == 12  # a draw for each string
    theirs = rows(answer.train(), start)
    assert torch.equal(theirs[:, :9][ids != 0], second[ids != 0])  # the answer stands where its string does
    assert (theirs[:3].diff(dim=1) > 0).all()  # and has a row more
    cache = KVCache(2)
    cache.append(start[:, :4]), cache.append(start[:, 4:])  # the second call decodes from position 4 on
    assert torch.equal(rows(answer, start[:, 4:], cache), theirs[:, 4:])
    fixed = rows(source.eval(), ids)
    assert torch.equal(fixed, rows(source, ids)) and torch.equal(fixed[0], fixed[1])
    assert not torch.equal(fixed[0, :6], fixed[3, :6]) and torch.equal(rows(source, ids[:3]), fixed[:3])


def test_swiglu_has_as_many_parameters_within_a_thousandth(monkeypatch):
    monkeypatch.setattr(train, "D_MODEL", 128)
    ours, theirs = (sum(p.numel() for p in fresh(name).parameters()) for name in ("recipe", "swiglu"))
    assert ours == 931_213 and abs(theirs - ours) < ours / 1000
    model = fresh("swiglu")
    recipe, state = fresh("recipe").state_dict(), model.state_dict()
    assert all(torch.equal(recipe[key], state[key]) for key in recipe if ".ffn." not in key)
    ffn = model.encoder.layers[0].ffn.eval()
    assert isinstance(ffn, swiglu.SwiGLU) and not ffn.gate.bias.any()
    x = torch.randn(1, 2, 128)
    a = x @ ffn.gate.weight.T
    torch.testing.assert_close(ffn(x), (a * a.sigmoid() * (x @ ffn.up.weight.T)) @ ffn.down.weight.T)


def test_torch_stacks_are_the_same_model(whole):
    ours, theirs = fresh("recipe"), fresh("torch-stacks")
    pairs = list(torch_stacks.model_pairs(ours, theirs))
    assert all(torch.equal(a, b[rows]) for a, b, rows in pairs)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    folder, _ = whole
    measured = json.loads(result(folder, "torch_stacks-measured").read_text(encoding="utf-8"))
    assert 0 < measured["output_difference"] < 1e-4 and measured["gradient_difference"] < 1e-4
    assert measured["same_answers"] == 1.0


def test_sorting():
    src, tgt = train.make_dataset(50, seed=0)
    answer = sorting.sorted_answer(src, tgt)
    for before, after in zip(src, answer[:, 1:], strict=True):
        assert train.decode_digits(after) == "".join(sorted(train.decode_digits(before)))
    assert torch.equal(answer < train.NUM_OFFSET, tgt < train.NUM_OFFSET)
    long_src, long_tgt = strings_of_length(20, 3)
    long_answer = sorting.sorted_answer(long_src, long_tgt)
    assert train.decode_digits(long_answer[0, 1:]) == "".join(sorted(train.decode_digits(long_src[0])))
    for found in sorting.where_it_looks(fresh("sort"), src, answer):
        assert sum(found[name] for name in sorting.LOOKS) == pytest.approx(1.0, abs=1e-5)
        assert 0 < found["one_copy"] <= 1 and 0 < found["antidiagonal"] < 1


def test_causal_cross_attention_hides_the_memory_behind_the_query():
    model = fresh("causal-cross").eval()
    src, tgt = strings_of_length(6, 2)
    with torch.no_grad():
        memory, mask = model.encode(src)
        before, weights = model.decode(tgt[:, :-1], memory, mask)
        memory[:, 4:] += 1
        after, _ = model.decode(tgt[:, :-1], memory, mask)
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.allclose(before[:, 4:], after[:, 4:])
    assert all(not layer.triu(1).any() for layer in weights)


def test_exposure_bias_measures():
    model = fresh("recipe")
    src, tgt = strings_of_length(12, 200)
    corrupted = exposure_bias.corrupt(tgt[:, :-1], torch.ones(200, 13, dtype=torch.bool))
    assert (corrupted[:, 0] == train.BOS_ID).all() and (corrupted[:, 1:] != tgt[:, 1:-1]).all()
    assert corrupted[:, 1:].min() == train.NUM_OFFSET and corrupted.max() < train.VOCAB
    with torch.no_grad():
        model.out_proj.weight.zero_()
        model.out_proj.bias[3 + 7] = 5.0  # says 7, whatever it reads
    row = exposure_bias.by_length(model, 3)
    assert row["forced"] == row["free"] and row["exact_match"] == row["forced_all_right"] == 0
    assert row["if_independent"] == pytest.approx(row["forced"] ** 4)


def test_exact_match_is_all_tokens_right_under_teacher_forcing(whole):
    """With the right prefix so far, the free run has said the same: the two must agree string by string."""
    folder, _ = whole
    measured = json.loads(result(folder, "exposure_bias-measured").read_text(encoding="utf-8"))
    for found in measured.values():
        rows = found["lengths"].values()
        assert all(row["exact_match"] == row["forced_all_right"] for row in rows)


def test_score_parts_add_up_to_the_scores():
    model = fresh("default").eval()
    for norm in (layer.ln1 for layer in model.encoder.layers):
        torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    src = strings_of_length(7, 3)[0]
    with torch.no_grad():
        parts = dot_products.score_parts(model, src)
        weights = attention_weights(model, src, src)["encoder"][0]
    assert set(parts) == {*dot_products.SPLIT, "bias"}
    torch.testing.assert_close(sum(parts.values()).softmax(-1), weights, atol=1e-5, rtol=1e-4)
    found = dot_products.spreads(fresh("recipe"), src)
    assert found["bias"] == 0 and all(found[name] > 0 for name in dot_products.SPLIT)


# ----------------------------------------------------------------------------------------------- the runner


def test_the_recipe_is_train_py_bit_for_bit(whole, tmp_path):
    folder, _ = whole
    assert train.main(["--recipe", "fast", "--out", str(tmp_path / "a.pt"), "--device", "cpu"]) == 0
    theirs = train.load_checkpoint(tmp_path / "a.pt")["history"]
    ours = json.loads(result(folder, "recipe").read_text(encoding="utf-8"))["history"]
    for a, b in zip(ours, theirs, strict=True):
        assert {key: a[key] for key in b if key != "seconds"} == {k: b[k] for k in b if k != "seconds"}


def test_again_gives_the_same_files_and_finished_ones_are_left(whole, monkeypatch, capsys):
    folder, _ = whole
    command = ["length_generalisation", "sorting", "--recipe", "fast", "--seeds", "0", *folders(folder)]
    paths = [result(folder, name) for name in ("recipe", "randomised-positions", "sorting-measured")]
    before = [path.read_bytes() for path in paths]
    assert run.main([*command, "--again"]) == 0
    assert [path.read_bytes() for path in paths] == before
    monkeypatch.setattr(common, "train_epoch", None)  # training would fail
    assert run.main(command) == 0
    assert "3 of 3 runs are there already" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_to_the_same_result(empty, monkeypatch, capsys):
    command = ["swiglu", "--recipe", "chapter", *folders(empty)]
    assert run.main(command) == 0
    expected = result(empty, "swiglu", "chapter").read_bytes()
    shutil.rmtree(empty / "results")
    (empty / "results").mkdir()
    honest, count = common.train_epoch, 0

    def interrupted(*args):
        nonlocal count
        count += 1
        if count == 4:  # two epochs of the recipe, one of the variant
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(common, "train_epoch", interrupted)
    assert (
        run.main(command) == 130 and "the same command, without --again, goes on" in capsys.readouterr().out
    )
    assert not result(empty, "swiglu", "chapter").exists()
    assert run.main(command) == 0 and count == 5  # only what was missing
    assert result(empty, "swiglu", "chapter").read_bytes() == expected
    assert json.loads(expected)["history"][1]["epoch"] == 2 and not list((empty / "results").glob("*.tmp"))


def test_runs_come_cheapest_first_and_each_once():
    args, jobs = run.parse_args(["--all", "--again"])
    costs = [job.cost for job in jobs]
    names = [(job.variant.name, job.run["recipe"], job.run["seed"]) for job in jobs]
    assert costs == sorted(costs) and len(set(names)) == len(names) == 4 * len(VARIANTS)
    assert all(name in VARIANTS for name, _, _ in names)


def test_list_and_table_show_all(whole, capsys):
    folder, _ = whole
    assert run.main(["--list", *folders(folder)]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in [*run.EXERCISES, *VARIANTS])
    assert run.main(["--table", *folders(folder)]) == 0
    table = capsys.readouterr().out
    assert all(f"(`{name}`)" in table for name in run.EXERCISES) and "not run yet" in table
    assert "| 0.166, 0.604 |" in table and f"{len(VARIANTS)} runs" in table
    for line in table.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_tables_of_whatever_results_are_there(whole, empty):
    """Any one result missing, as while they are being made."""
    results = sorted((whole[0] / "results").glob("*.json"))
    for path in results:
        shutil.copy(path, empty / "results")
    for path in results:
        copy = empty / "results" / path.name
        copy.unlink()
        for name in run.EXERCISES:
            tables = run.tables_of(empty / "results", name)
            assert all(len({len(row) for row in table}) == 1 for table in tables), (name, path)
        shutil.copy(path, copy)


def test_as_a_program_under_strict_warnings_it_writes_nothing_unasked(empty):
    command = [*STRICT, *ENCODING, "-m", "exercises.run", "--list", *folders(empty)]
    process = run_python(*command, folder=ROOT)
    assert process.returncode == 0 and not own_warnings(process.stderr)
    assert "norm                    0/32 runs" in process.stdout
    assert not list((empty / "results").iterdir()) and not list((empty / "pictures").iterdir())


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b"half a file"])
def test_a_broken_result_file_is_one_line_that_names_it(empty, capsys, content):
    path = empty / "results" / "heads-1.fast.0.json"
    path.write_bytes(content)
    assert run.main(["heads", "--table", *folders(empty)]) == 2
    assert f"{path}: not a result file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        run.main(["heads", "--recipe", "fast", "--seeds", "0", *folders(empty)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and str(path) in error and error.count("\n") == 1
    assert path.read_bytes() == content


def test_a_picture_that_cannot_be_written_is_one_line(whole, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "draw", full)
    assert run.main(["heads", "--recipe", "fast", "--seeds", "0", *folders(whole[0])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("exercises.run: error: ") and error.count("\n") == 1 and "No space" in error


def section_of_the_readme(name):
    readme = (ROOT / "exercises" / "README.md").read_text(encoding="utf-8")
    return readme.partition(f"python -m exercises.run {name}`")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", run.EXERCISES)
def test_the_readme_has_the_tables_of_the_result_files(name):
    section = section_of_the_readme(name)
    tables = run.tables_of(run.RESULTS, name)
    assert tables and "not run yet" not in section
    for table in tables:
        assert run.markdown(table) in section
    assert sum(line.startswith("|---") for line in section.splitlines()) == len(tables)  # no other


def test_a_loss_that_is_no_number_is_null(tmp_path):
    common.write_json(tmp_path / "a.json", {"loss": float("nan"), 3: [float("inf"), 1.5, True]})
    assert common.read_json(tmp_path / "a.json") == {"loss": None, "3": [None, 1.5, True]}


def test_labels_are_kept_apart():
    places = pictures.apart([0.99, 1.0, 0.2, 0.98, 0.21], 0.05)
    ordered = sorted(places)
    assert (
        all(b - a >= 0.05 - 1e-9 for a, b in zip(ordered, ordered[1:], strict=False)) and max(places) <= 1.02
    )
    assert places[1] > places[0] > places[3] > places[4] > places[2]


@pytest.mark.parametrize(
    "options, words",
    [
        (["nope"], ["NAME nope", "initialisation", "timing"]),
        ([], ["NAME", "--all", "--list"]),
        (["heads", "--all"], ["--all", "heads"]),
        (["heads", "--recipe", "slow"], ["--recipe", "slow", "fast"]),
        (["heads", "--seeds", "0,x"], ["--seeds", "'x'", "whole number"]),
        (["heads", "--epochs", "0"], ["--epochs", "'0'", "at least 1"]),
        (["heads", "--results", "no/such"], ["--results no/such", "folder"]),
        (["heads", "--pictures", "no/such"], ["--pictures no/such", "folder"]),
    ],
)
def test_errors_are_one_line(options, words, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(options)
    output = capsys.readouterr()
    assert stop.value.code == 2 and output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("exercises.run: error: ") and all(word in output.err for word in words)


def test_results_of_other_options_are_not_mixed(whole, empty, capsys):
    folder, _ = whole
    with pytest.raises(SystemExit) as stop:
        run.main(["heads", "--recipe", "fast", "--seeds", "0", "--epochs", "3", *folders(folder)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "--epochs 3" in error and "--again" in error and error.count("\n") == 1
    shutil.copy(folder / "results" / "recipe.fast.0.pt", empty / "results")
    options = ["sorting", "--recipe", "fast", "--seeds", "0", "--epochs", "3", *folders(empty)]
    assert run.main(options) == 2
    error = capsys.readouterr().err
    assert "recipe.fast.0.pt" in error and "--again" in error and error.count("\n") == 1
