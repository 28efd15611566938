"""Who imports whom: model.py stands alone, each folder uses what stands below it, and there is no circle.
What comes from outside is declared, in requirements.txt or, for translation/, in its own.

Every import is followed, also one inside a function or under TYPE_CHECKING: it ties two files together too.
"""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest
from processes import ROOT

# A script at the top or a folder -> what its files may import of this project.
CHAPTER = {"model", "train", "viz", "mha_vs_sdpa", "toolbox"}
MAY_IMPORT = {
    "model": set(),
    "toolbox": {"toolbox"},
    "train": {"model", "toolbox"},
    "page": {"model", "train", "toolbox", "page"},
    "viz": {"model", "train", "toolbox", "page"},
    "mha_vs_sdpa": {"model", "toolbox"},
    "test_model": {"model"},
    "translation": CHAPTER | {"page", "translation"},
    "benchmarks": CHAPTER | {"benchmarks"},
    "benchmarks.joey": CHAPTER | {"benchmarks", "translation"},  # it trains the translation model
    "exercises": CHAPTER | {"exercises", "benchmarks"},  # nn.Transformer's twin, and a model to time
    "tests": CHAPTER | {"page", "test_model", "translation", "benchmarks", "exercises", "tests"},
}


def modules(root: Path) -> dict[str, Path]:
    """Name -> file, relative to root. The files of tests/ import one another by their bare names.

    .ci/ is for its developers, with tools of their own.
    """
    files = [path.relative_to(root) for pattern in ("*.py", "[!.]*/*.py") for path in root.glob(pattern)]
    named = {".".join(file.with_suffix("").parts): file for file in files}
    return {name.removeprefix("tests."): file for name, file in named.items()}


def imported(root: Path, name: str, known: dict[str, Path]) -> set[str]:
    """The modules of the project that the module `name` imports; one that does not exist is among them."""
    tree, found = ast.parse((root / known[name]).read_text(encoding="utf-8"), str(known[name])), set()
    ours = {first.split(".")[0] for first in known}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            candidates = [[alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(known[name].parent.parts) if node.level else ""
            source = ".".join(filter(None, [package, node.module]))
            # `from a import b`: b is a module of the folder a, or a name inside the module a.
            candidates = [[f"{source}.{alias.name}", source] for alias in node.names]
        else:
            continue
        for names in candidates:
            if names[-1].split(".")[0] in ours:
                found.add(next((n for n in names if n in known), names[0]))
    return found


def import_graph(root: Path) -> dict[str, set[str]]:
    """Every module of the project -> the modules of the project that it imports."""
    known = modules(root)
    return {name: imported(root, name, known) for name in known}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of modules, its first one again at the end; empty where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def forbidden(root: Path) -> list[str]:
    """Every import that MAY_IMPORT does not list, or whose module does not exist."""
    known, wrong = modules(root), []
    for name, targets in import_graph(root).items():
        allowed = MAY_IMPORT[name if name in MAY_IMPORT else known[name].parts[0]]
        for target in sorted(targets):
            if target not in known:
                wrong.append(f"{name} imports {target}, which does not exist")
            elif known[target].with_suffix("").parts[0] not in allowed:
                wrong.append(f"{name} imports {target}")
    return wrong


def test_no_module_imports_itself_in_a_circle():
    assert circle(import_graph(ROOT)) == []


def test_every_file_imports_only_what_stands_below_it():
    assert forbidden(ROOT) == []


def test_the_graph_is_the_project_s():
    """A few edges that are there today: a graph without any would pass every test above."""
    graph = import_graph(ROOT)
    assert graph["model"] == set() and {"model", "toolbox.checkpoint"} <= graph["train"]
    assert {"model", "train", "toolbox.heatmap", "page.build"} <= graph["viz"]
    assert "translation.data" in graph["benchmarks.joey"]
    assert {"test_model", "test_train", "test_model_details"} <= graph["test_pitfalls"]
    assert {"exercises.norm", "exercises.common"} <= graph["exercises.run"]  # from exercises import norm


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "last",
    [
        "import train",
        "def later():\n    import train",
        "if TYPE_CHECKING:\n    from train import Thing",
        "try:\n    from train import thing\nexcept ImportError:\n    pass",
        "from . import c",
        "from .c import thing",
    ],
)
def test_a_planted_circle_is_found(last, tmp_path):
    write(tmp_path, {"train.py": "import toolbox.a", "toolbox/a.py": "from toolbox import b"})
    write(tmp_path, {"toolbox/b.py": "import os, torch", "toolbox/c.py": "import train"})
    assert circle(import_graph(tmp_path)) == []
    write(tmp_path, {"toolbox/b.py": last})
    found = circle(import_graph(tmp_path))
    assert found[0] == found[-1] and {"train", "toolbox.a", "toolbox.b"} <= set(found)


@pytest.mark.parametrize(
    "name, text, target",
    [
        ("model.py", "from toolbox.a import thing", "toolbox.a"),
        ("toolbox/a.py", "def later():\n    from model import Transformer", "model"),
        ("train.py", "import translation.data as data", "translation.data"),
        ("viz.py", "from exercises import norm", "exercises.norm"),
        ("mha_vs_sdpa.py", "from test_all import check", "test_all"),
        ("translation/data.py", "from exercises.norm import thing", "exercises.norm"),
        ("exercises/norm.py", "from translation import data", "translation.data"),
        ("toolbox/a.py", "from toolbox.gone import thing", "toolbox.gone.thing, which does not exist"),
    ],
)
def test_a_planted_import_from_above_is_found(name, text, target, tmp_path):
    files = ("model.py", "train.py", "viz.py", "mha_vs_sdpa.py", "toolbox/a.py", "translation/data.py")
    write(tmp_path, dict.fromkeys([*files, "exercises/norm.py", "tests/test_all.py"], "import torch"))
    assert forbidden(tmp_path) == []
    write(tmp_path, {name: text})
    (line,) = forbidden(tmp_path)
    assert line.endswith(f" imports {target}")


# ---------------------------------------------------------------------------------- packages from outside

SPEAKS_FOR = {"torch.utils.tensorboard": "tensorboard"}  # a module that imports a package that is not its own


def declared(file: Path) -> set[str]:
    """The packages of a requirements file; each is imported by the name it is installed by."""
    lines = re.findall(r"^[A-Za-z0-9][\w.-]*", file.read_text(encoding="utf-8"), re.M)
    return {line.replace("-", "_").lower() for line in lines}


def outside(file: Path, ours: set[str]) -> set[tuple[str, bool]]:
    """(package, guarded) for each import of what is neither the project's nor the standard library's.

    Guarded is an import that ImportError is caught around, and one after pytest.importorskip in the same
    function, or at the top of the file for all of it.
    """
    found = set()

    def visit(node: ast.AST, skipped: set[str], caught: bool) -> None:
        names, called = [], ""
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", "")  # importlib.import_module("a"), pytest.importorskip("a")
            names = [node.args[0].value] if called in ("import_module", "importorskip") else []
        for name in (SPEAKS_FOR.get(name, name.split(".")[0]) for name in names):
            if called == "importorskip":
                skipped.add(name)
            elif name not in ours and name not in sys.stdlib_module_names:
                found.add((name, caught or name in skipped))
        if isinstance(node, ast.FunctionDef):
            skipped = set(skipped)  # what a function skips for, it skips for itself
        handlers = [ast.unparse(handler) for handler in getattr(node, "handlers", [])]
        fails = any(re.match(r"except .*(ImportError|ModuleNotFoundError)", text) for text in handlers)
        for child in ast.iter_child_nodes(node):
            visit(child, skipped, caught or fails and child in node.body)

    visit(ast.parse(file.read_text(encoding="utf-8"), str(file)), set(), False)
    return found


def undeclared(root: Path) -> list[str]:
    """Every unguarded import that is not declared, and every requirement that nobody imports."""
    files = ["requirements.txt", "translation/requirements.txt"]
    core, own = (declared(root / file) for file in files)
    ours = {first.split(".")[0] for first in modules(root)}
    wrong, used = [], {False: set(), True: set()}
    for name, file in sorted(modules(root).items()):
        here = file.parts[0] == "translation"
        for package, guarded in sorted(outside(root / file, ours)):
            used[here].add(package)
            if not guarded and package not in (core | own if here else core):
                wrong.append(f"{name} imports {package}")
    for file, unused in zip(files, [core - used[False], own - used[True]], strict=True):
        wrong += [f"{file}: nobody imports {package}" for package in sorted(unused)]
    return wrong


def test_what_is_imported_is_what_is_declared():
    assert undeclared(ROOT) == []
    assert declared(ROOT / "requirements.txt") == {"torch", "numpy", "matplotlib", "pytest"}
    assert declared(ROOT / "translation" / "requirements.txt") >= {"sentencepiece", "tensorboard"}


@pytest.mark.parametrize(
    "file, text, line",
    [
        ("train.py", "import torch, tqdm", "train imports tqdm"),
        ("train.py", "def later():\n    from yaml.reader import Reader", "train imports yaml"),
        ("train.py", "import torch\nimportlib.import_module('tqdm.auto')", "train imports tqdm"),
        ("train.py", "try:\n    import tqdm\nexcept OSError:\n    pass", "train imports tqdm"),
        ("train.py", "try:\n    pass\nexcept ImportError:\n    import tqdm", "train imports tqdm"),
        ("translation/data.py", "import tqdm, sacrebleu", "translation.data imports sacrebleu"),
        ("train.py", "from torch.utils.tensorboard import SummaryWriter", "train imports tensorboard"),
        ("tests/test_all.py", "import pytest, tqdm", "test_all imports tqdm"),
        ("tests/test_all.py", "import tqdm\npytest.importorskip('tqdm')", "test_all imports tqdm"),
        (
            "tests/test_all.py",
            "def a():\n    pytest.importorskip('tqdm')\ndef b():\n    import tqdm",
            "test_all imports tqdm",
        ),
        ("requirements.txt", "torch>=2\npytest\nnumpy>=1.26", "requirements.txt: nobody imports numpy"),
        (
            "translation/requirements.txt",
            "tqdm\npytest",
            "translation/requirements.txt: nobody imports pytest",
        ),
    ],
)
def test_a_planted_import_or_requirement_without_its_other_half_is_found(file, text, line, tmp_path):
    write(tmp_path, {"requirements.txt": "torch>=2,<3\npytest\n", "train.py": "import os, torch, toolbox.a"})
    write(tmp_path, {"toolbox/a.py": "try:\n    import yaml\nexcept (ImportError, OSError):\n    pass"})
    write(tmp_path, {"translation/requirements.txt": "-r ../requirements.txt\ntqdm>=4.66\n"})
    write(tmp_path, {"translation/data.py": "importlib.import_module('tqdm')\nfrom . import data"})
    guarded = "import pytest, torch\npytest.importorskip('tqdm')\ndef a():\n    import tqdm"
    write(tmp_path, {"tests/test_one.py": guarded, "tests/test_all.py": "import test_one"})
    assert undeclared(tmp_path) == []
    write(tmp_path, {file: text})
    assert line in undeclared(tmp_path)
