"""The parts of `benchmarks.gpu_check`: each proves or refutes what the project says about a GPU.

A part takes a `Setting` and returns a dict for the JSON file. Its "claims" say what was to be shown and
whether it was; the rest are the figures behind that. What benchmarks/ measures already is called, not written
again.
"""

import contextlib
import importlib.util
import io
import platform
import re
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import mha_vs_sdpa
import train
from benchmarks import recipes, run
from benchmarks.step_time import training_step
from model import (
    Transformer,
    additive_mask,
    make_causal_mask,
    make_padding_mask,
    scaled_dot_product_attention,
)
from toolbox.device import device_name
from toolbox.measure import attempt, compare, milliseconds, traced, without_tf32

ROOT = Path(__file__).resolve().parent.parent


class Setting(NamedTuple):
    """Where to check: `precision` is that of `--precision auto` there, `tiny` a dry run, `folder` scratch."""

    device: torch.device
    precision: str
    tiny: bool
    folder: Path

    def pick(self, full: Any, tiny: Any) -> Any:
        """The first, or in a dry run the second."""
        return tiny if self.tiny else full


@contextlib.contextmanager
def small_recipes() -> Iterator[None]:
    """Within: both recipes take a moment, and a model is 16 wide. For a dry run."""
    sizes = dict(samples=64, batch_size=32, epochs=2, warmup=1)
    small = {name: recipe | sizes for name, recipe in train.RECIPES.items()}
    with contextlib.ExitStack() as changed:
        changed.enter_context(patch.dict(train.RECIPES, small))
        for module, name, value in (
            (train, "D_MODEL", 16), (train, "TEST_SIZE", 20), (train, "VAL_SCORED", 20),
            (recipes, "TEST_SIZE", 20),
        ):  # fmt: skip
            changed.enter_context(patch.object(module, name, value))
        yield


def script(*arguments: object, timeout: float = 180) -> tuple[int, str]:
    """Run python with these arguments in the project's folder -> exit status, all it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, timeout=timeout, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


# ------------------------------------------------------------------------------------- machine and test suite


def versions(setting: Setting) -> dict:
    """What this machine is, and whether one kernel runs on it."""
    found = dict(
        python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(), device=device_name(setting.device), precision=setting.precision,
        fp32_products=torch.get_float32_matmul_precision(),
    )  # fmt: skip
    if setting.device.type == "cuda":
        card = torch.cuda.get_device_properties(setting.device)
        found |= dict(capability=f"{card.major}.{card.minor}", memory=card.total_memory)
        found |= dict(built_for=torch.cuda.get_arch_list(), processors=card.multi_processor_count)
    ones = torch.ones(64, 64, device=setting.device)
    return found | dict(claims={"one kernel": (ones @ ones).sum().item() == 64**3})


def tests(setting: Setting) -> dict:
    """The tests that are skipped without a GPU."""
    status, output = script("-m", "pytest", "tests/test_gpu.py", "-rs", "-p", "no:cacheprovider")
    return dict(output=output[-4000:], claims={"tests/test_gpu.py passes": status == 0})


# ------------------------------------------------------------------------------------ every backend of SDPA

BACKENDS = {
    "the model's choice": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,  # switched off by model.py: what it does here is no claim of ours
}
CASES = ("is_causal", "causal", "padding", "fully masked row", "low scores")
CELL_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of a difference, as a share of the largest entry


def attention_case(case: str, length: int, dtype: torch.dtype, device: torch.device) -> tuple:
    """-> q, k, v [2, 4, L, 32] that need gradients, the mask True = masked, the rows that have a key."""
    torch.manual_seed(length)
    q, k, v = torch.randn(3, 2, 4, length, 32, device=device).unbind(0)
    mask = make_causal_mask(length, device)
    if case in ("padding", "fully masked row"):
        ids = torch.ones(2, length, dtype=torch.long, device=device)
        ids[0, length // 2 :] = 0
        ids[1, 0 if case == "fully masked row" else length - 1 :] = 0
        mask = make_padding_mask(ids)
    elif case == "low scores":  # all about -120: where cuDNN's gradients are NaN at some lengths
        q[..., 0], k[..., 0] = 1.0, -120 * 32**0.5
    has_key = ~mask.expand(2, 1, length, length).all(-1, keepdim=True)
    return *(x.to(dtype).requires_grad_() for x in (q, k, v)), mask, has_key


def output_and_gradients(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, has_key: Tensor):
    """-> output, gradients of q, k and v, all fp32; rows without a key count in neither."""
    output = attend(q, k, v)
    cotangent = torch.cos(torch.arange(output.numel(), device=q.device)).view_as(output) * has_key
    gradients = torch.autograd.grad(output, (q, k, v), cotangent.to(output.dtype))
    finite = bool(output.isfinite().all())
    return finite, [(output * has_key).float(), *(gradient.float() for gradient in gradients)]


def sdpa_cell(backend: str, case: str, length: int, dtype: torch.dtype, device: torch.device) -> dict:
    """One backend on one case against attention by hand in fp32, gradients too."""
    q, k, v, mask, has_key = attention_case(case, length, dtype, device)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        masks = dict(is_causal=True) if case == "is_causal" else dict(attn_mask=additive_mask(mask, dtype))
        return F.scaled_dot_product_attention(q, k, v, **masks)

    chosen = contextlib.nullcontext() if BACKENDS[backend] is None else sdpa_kernel(BACKENDS[backend])
    cell = dict(backend=backend, dtype=str(dtype).partition(".")[2], case=case, length=length)
    try:
        with chosen, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a line for every backend that will not do
            finite, ours = output_and_gradients(fused, q, k, v, has_key)
    except RuntimeError as error:
        if not re.search("no (available kernel|viable backend)", str(error), re.I):
            raise
        return cell | dict(verdict="refused")
    plain = [x.detach().float().requires_grad_() for x in (q, k, v)]
    by_hand = partial(scaled_dot_product_attention, mask=mask)
    _, theirs = output_and_gradients(lambda *qkv: by_hand(*qkv)[0], *plain, has_key)
    pairs = zip(ours, theirs, strict=True)
    off = torch.stack([(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in pairs]).max().item()
    if not finite or off != off:
        return cell | dict(verdict="not finite")
    # Scores of -120 in bf16 are rounded by more than they differ: only whether numbers come out counts.
    equal = case == "low scores" or off <= CELL_LIMIT[dtype]
    return cell | dict(verdict="equal" if equal else "different", off=off)


@without_tf32()
def sdpa(setting: Setting) -> dict:
    """Every backend x precision x case x length. A backend may refuse a case; the model's choice may not."""
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as model.py does
    try:
        cells = [
            sdpa_cell(backend, case, length, dtype, setting.device)
            for backend in BACKENDS
            for dtype in CELL_LIMIT
            for case in CASES
            for length in setting.pick((13, 14, 64, 200), (13, 64))
        ]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)
    claims = {}
    for backend in [name for name in BACKENDS if name != "cudnn"]:
        allowed = {"equal"} if BACKENDS[backend] is None else {"equal", "refused"}
        verdicts = {cell["verdict"] for cell in cells if cell["backend"] == backend}
        claims[f"SDPA, {backend}: as by hand"] = verdicts <= allowed
    return dict(cells=cells, claims=claims)


# --------------------------------------------------------------------------------- what a profiler can count


def kernels_of(call: Callable[[], object], device: torch.device) -> tuple[int, float] | None:
    """-> how many kernels call() launches, and their times added up in ms; None where the profiler is blind.

    On the CPU: the operators that call no other.
    """
    gpu = device.type == "cuda"
    events = traced(call, gpu=gpu).events()
    if gpu:
        found = [e for e in events if e.device_type == DeviceType.CUDA]
        found = [e for e in found if not getattr(e, "is_user_annotation", False)]
    else:
        found = [e for e in events if e.name.startswith("aten::") and not e.cpu_children]
    return (len(found), sum(e.time_range.elapsed_us() for e in found) / 1000) if found else None


def burst(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def attention(setting: Setting) -> dict:
    """mha_vs_sdpa.py's rows by length; the forward pass timed in three more ways.

    `median_ms` has a head start (see toolbox.measure), `no_head_start_ms` has none, `burst_ms` is a call's
    share of 50 in a row, `profiler_ms` the sum of the kernels.
    """
    device, repeats, count = setting.device, setting.pick(10, 2), setting.pick(50, 2)
    d_model, heads = setting.pick((512, 8), (16, 2))
    mha, rows = mha_vs_sdpa.make_attention(d_model, heads, device), []
    equality = mha_vs_sdpa.check_equal(mha)
    for length in setting.pick((256, 512, 1024, 2048, 4096), (16, 32)):
        x = torch.randn(8, length, d_model, device=device, requires_grad=True)
        measured = mha_vs_sdpa.measure(mha, x, repeats, repeats // 2, setting.precision)
        for row in [row for row in measured if row["pass"] == "forward" and not row["out_of_memory"]]:
            call = partial(mha_vs_sdpa.forward, row["contender"], mha, x, setting.precision)
            alone = [milliseconds(call, device) for _ in range(repeats)]
            row["no_head_start_ms"] = statistics.median(alone)
            row["burst_ms"] = milliseconds(partial(burst, call, count), device) / count
            row["launches"], row["profiler_ms"] = kernels_of(call, device) or (None, None)
        rows += measured
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    claims = attention_claims(rows) if (device.type, setting.precision) == ("cuda", "bf16") else {}
    return dict(rows=rows, equality=equality, cudnn_attention=cudnn, claims=claims)


def attention_claims(rows: list[dict]) -> dict[str, bool]:
    """What was expected of the forward pass at L=1024 on a GPU with bf16."""
    forward = {row["contender"]: row for row in rows if row["length"] == 1024 and row["pass"] == "forward"}
    claims = {}
    for name, expected in ((mha_vs_sdpa.FIRST, 707), ("SDPA", 53)):
        megabytes = (forward[name]["peak_bytes"] or 0) / 1e6
        claims[f"{name}, L=1024: a peak of about {expected} MB"] = abs(megabytes / expected - 1) < 0.1
    times = {name: row["median_ms"] or float("inf") for name, row in forward.items()}
    claims["in tiles, L=1024: slower than by hand"] = times["tiles"] > times[mha_vs_sdpa.FIRST]
    return claims


# ------------------------------------------------------------------------------------------ a training step


def steps_of(setting: Setting) -> dict[str, Callable[[], None]]:
    """The chapter's training step by hand and through SDPA, in fp32 (on a GPU TF32) and in bf16."""
    steps = {}
    for attend in ("manual", "sdpa"):
        for precision in ("fp32", "bf16"):
            torch.manual_seed(0)
            settings = train.make_model(train.RECIPES["chapter"] | dict(seed=0)).settings
            model = Transformer(**settings | dict(attention=attend))
            steps[f"{attend}, {precision}"] = training_step(model, setting.device, 64, precision)
    return steps


def launches(setting: Setting) -> dict:
    """Kernels that a step launches; and that nothing in a step waits for the GPU."""
    counts, claims = {}, {}
    for name, step in steps_of(setting).items():
        for _ in range(3):
            step()
        counts[name] = kernels_of(step, setting.device)
        try:
            if setting.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            step()
            waits = None
        except RuntimeError as error:
            waits = str(error)
        finally:
            if setting.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        claims[f"a step waits for nothing: {name}"] = waits is None
    return dict(launches_and_ms=counts, claims=claims)


def step(setting: Setting) -> dict:
    """Time of a step: is bf16, which auto takes, the faster one?"""
    steps, rounds = steps_of(setting), setting.pick(60, 2)
    times = compare(steps, rounds, setting.pick(10, 1), setting.device, "training step")
    claims = {}
    if setting.precision == "bf16":
        by_hand = {precision: times[f"manual, {precision}"]["median_ms"] for precision in ("fp32", "bf16")}
        claims["bf16, which auto takes, is not slower than fp32"] = by_hand["bf16"] <= by_hand["fp32"]
    return dict(times=times, claims=claims)


# --------------------------------------------------------------------------------------------- whole recipes


def train_script(
    setting: Setting, name: str, *options: object, device: str | None = None
) -> tuple[Path, str]:
    """train.py on the device in this process -> its checkpoint in the folder, what it printed.

    RuntimeError where it fails.
    """
    path, printed = setting.folder / name, io.StringIO()
    where = ["--device", device or setting.device.type, "--out", path]
    with contextlib.redirect_stdout(printed):
        status = train.main([*map(str, [*options, *where])])
    if status:
        raise RuntimeError(f"train.py {' '.join(map(str, options))} ended with status {status}")
    return path, printed.getvalue()


def recipe_runs(setting: Setting) -> dict:
    """The chapter's recipe with seeds 0 to 2, the fast one with 0 to 4: all they print, and every epoch."""
    runs, claims = [], {}
    for recipe, seeds in (("chapter", 3), ("fast", 5)):
        for seed in range(setting.pick(seeds, 1)):
            options = ["--recipe", recipe, "--seed", seed]
            path, output = train_script(setting, f"{recipe}.{seed}.pt", *options)
            unseen = float(re.search(r"^  right .* (\S+)$", output, re.M)[1])
            history = train.load_checkpoint(path)["history"]
            runs.append(dict(recipe=recipe, seed=seed, unseen=unseen, history=history, output=output))
        worst = min(found["unseen"] for found in runs if found["recipe"] == recipe)
        claims[f"{recipe} recipe: every seed has 99 % of the unseen strings right"] = worst >= 0.99
    return dict(runs=runs, claims={} if setting.tiny else claims)


def same_tensors(a: dict, b: dict) -> bool:
    """Are the weights of two checkpoints equal, to the bit?"""
    return all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


@patch.object(train, "TEST_SIZE", 20)
def resume(setting: Setting) -> dict:
    """A run of two epochs, the same again, and one that stops after the first and goes on."""
    options = ["--samples", setting.pick(6400, 64), "--batch-size", setting.pick(64, 32), "--warmup", 100]
    whole, again = (train_script(setting, f"{n}.pt", *options, "--epochs", 2)[0] for n in ("whole", "again"))
    train_script(setting, "resumed.pt", *options, "--epochs", 1)
    resumed, _ = train_script(setting, "resumed.pt", "--resume", "--epochs", 2)
    first, second, third = (train.load_checkpoint(path) for path in (whole, again, resumed))
    claims = {"the same run twice: the same weights to the bit": same_tensors(first, second)}
    return dict(claims=claims | {"a resumed run: the same weights to the bit": same_tensors(first, third)})


@patch.object(train, "TEST_SIZE", 20)
@without_tf32()
def checkpoints(setting: Setting) -> dict:
    """A checkpoint of the GPU on the CPU, and the other way round: same outputs, and training goes on."""
    options = ["--samples", setting.pick(1280, 64), "--batch-size", setting.pick(64, 32), "--warmup", 100]
    src, tgt = train.make_dataset(setting.pick(500, 20), train.VAL_SEED)
    here, claims, off = setting.device.type, {}, {}
    for made, other in ((here, "cpu"), ("cpu", here)):
        name = f"made on {made}, used on {other}"
        path, _ = train_script(setting, f"{made}-{other}.pt", *options, "--epochs", 1, device=made)
        logits, outputs = [], []
        for device in (made, other):
            model = train.load_model(path, device)[0]
            with torch.no_grad():
                logits.append(model(src.to(device), tgt.to(device)[:, :-1]).cpu())
            output = train.greedy_decode(model, src.to(device), src.size(1)).cpu()
            outputs.append(F.pad(output, (0, src.size(1) - output.size(1))))
        off[name] = (logits[0] - logits[1]).abs().max().item()
        claims[f"{name}: the same logits"] = off[name] < 1e-3
        same = (outputs[0] == outputs[1]).all(1).float().mean().item()
        claims[f"{name}: the same output"] = same >= 0.99  # a tie may be rounded another way
        train_script(setting, path.name, "--resume", "--epochs", 2, device=other)
        claims[f"{name}: training goes on"] = len(train.load_checkpoint(path)["history"]) == 2
    return dict(off=off, claims=claims)


# ------------------------------------------------------------------------------------ benchmarks and the rest

SMALL_BENCHMARKS = {
    "attention": dict(batch=2, length=8, d_model=16, heads=2),
    "step": dict(rounds=2, batch_size=4),
    "decoding": dict(strings=4, batch=2, lengths=(3, 5), rounds=2),
    "memory": dict(lengths=(8, 16), batches=(1, 2)),
    "recipes": dict(seeds=1),
}


def benchmarks_run(setting: Setting) -> dict:
    """Every section of benchmarks.run, as it writes them."""
    found = {}
    for section, measure in run.MEASURE.items():
        precision = run.own_precision(section, setting.precision)
        sizes = SMALL_BENCHMARKS[section] if setting.tiny else {}
        found[section] = dict(precision=precision, results=measure(setting.device, precision, **sizes))
    return found


def translation(setting: Setting) -> dict:
    """`translation.train --sample`: it learns the 160 pairs, through SDPA, on the GPU."""
    missing = [n for n in ("sentencepiece", "sacrebleu", "tqdm") if importlib.util.find_spec(n) is None]
    if missing:
        return dict(left_out=f"{', '.join(missing)}: pip install -r translation/requirements.txt")
    short = ["--epochs", 1, "--bleu-every", 0, "--d-model", 32, "--num-heads", 2, "--max-tokens", 2000]
    options = ["--sample", "--out", setting.folder / "translation", "--device", setting.device.type]
    status, output = script("-m", "translation.train", *options, *setting.pick([], short))
    return dict(output=output[-6000:], claims={"translation.train --sample": status == 0})


def ddp(setting: Setting) -> dict:
    """DistributedDataParallel with one process, under NCCL on a GPU: the updates of the bare model."""
    src, tgt = (ids.to(setting.device) for ids in train.make_dataset(64, 0))
    gpu, ended = setting.device.type == "cuda", []
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for wrapped in (False, True):
            run_of = train.RECIPES["chapter"] | dict(seed=0, dropout=0.0)
            model = train.make_model(run_of).to(setting.device).train()
            optimizer, scheduler = train.make_optimizer(model, run_of)
            ids = [torch.cuda.current_device()] if gpu else None
            called = DistributedDataParallel(model, device_ids=ids) if wrapped else model
            for _ in range(5):
                train.train_step(called, optimizer, scheduler, src, tgt)
            ended.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    finally:
        dist.destroy_process_group()
    off = (ended[0] - ended[1]).abs().max().item()
    return dict(backend=backend, off=off, claims={f"one rank under {backend}: the same updates": off < 1e-5})


def guarded(part: Callable[[Setting], dict], setting: Setting) -> dict:
    """part(setting), in a dry run with small recipes."""
    with small_recipes() if setting.tiny else contextlib.nullcontext():
        return attempt(partial(part, setting)) or dict(error="out of memory")


PARTS: dict[str, Callable[[Setting], dict]] = {
    "versions": versions,
    "tests": tests,
    "sdpa": sdpa,
    "attention": attention,
    "launches": launches,
    "step": step,
    "recipes": recipe_runs,
    "resume": resume,
    "checkpoints": checkpoints,
    "benchmarks": benchmarks_run,
    "translation": translation,
    "ddp": ddp,
}
