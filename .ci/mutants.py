"""Mutation testing, for development: change the code in every small way and see whether a test notices.

    pip install mutmut coverage
    python .ci/mutants.py --work FOLDER model.py toolbox/files.py

A mutant is a file with one change by one of mutmut's operators: another number or operator, an argument left
out, None assigned... The operator that changes the text of strings is left out: what people read is compared
by its meaning. The suite runs once under coverage, so that each line knows its tests; a mutant then meets
those alone, those that killed others first and then the quickest, until one fails or hangs. FOLDER keeps what
was found, and a second start goes on from there.
"""

import argparse
import ast
import collections
import contextlib
import importlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import libcst as cst
from coverage.numbits import numbits_to_nums
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

ROOT = Path(__file__).resolve().parent.parent
IMPORT = "import"  # the context of lines that run when a module is imported
PLUGIN = f"""
import json, os, collections, coverage, pytest
seconds = collections.Counter()
def pytest_collection_finish():
    coverage.Coverage.current().switch_context("{IMPORT}")
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    os.environ["MUTANTS_TEST"] = item.nodeid  # for the processes that a test starts
    coverage.Coverage.current().switch_context(item.nodeid)
def pytest_runtest_logreport(report):
    seconds[report.nodeid] += float("inf") if report.failed else report.duration
def pytest_sessionfinish():
    with open(os.environ["MUTANTS_SECONDS"], "w") as file:
        json.dump(seconds, file)
"""
COVERAGE = """[run]
source = .
parallel = true
patch = subprocess
context = ${MUTANTS_TEST-import}
data_file = ${MUTANTS_DATA}
"""
HEAVY = ("matplotlib.pyplot", "torch.utils.tensorboard", "sacrebleu", "sentencepiece")  # imported once
WHAT = ("line", "operator", "was", "now")  # what tells one mutant from another
LINES = "select file_id, context_id, numbits from line_bits"


# ------------------------------------------------------------------------------------------------- mutants


class Sites(cst.CSTVisitor):
    """Every place that can be changed: where, the lines of its statement, the operator, the new text."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, module: cst.Module):
        self.module, self.found, self.statements = module, [], []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Import | cst.ImportFrom | cst.Decorator):
            return False  # types change nothing, and without an import every test ends
        where = self.get_metadata(PositionProvider, node, None)
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            last = where.end if isinstance(node, cst.SimpleStatementLine) else where.start
            self.statements.append({*range(where.start.line, last.line + 1)})
        for kind, operator in mutators.mutation_operators:
            if isinstance(node, kind) and operator is not mutators.operator_string:
                for new in operator(node):
                    lines = self.statements[-1] | {*range(where.start.line, where.end.line + 1)}
                    self.found.append((where, lines, operator.__name__, self.module.code_for_node(new)))
        return True

    def on_leave(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self.statements.pop()


def mutants(source: str) -> list[dict]:
    """All mutants: `line`, what it `was` and is `now`, the whole `code`, the `lines` that run with it."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    sites = Sites(wrapper.module)
    wrapper.visit(sites)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    result, seen = [], {ast.dump(ast.parse(source))}
    for where, lines, operator, text in sites.found:
        first = starts[where.start.line - 1] + where.start.column
        end = starts[where.end.line - 1] + where.end.column
        code = source[:first] + text + source[end:]
        with contextlib.suppress(SyntaxError):
            meaning = ast.dump(ast.parse(code))
            if meaning not in seen:
                seen.add(meaning)
                row = dict(line=where.start.line, operator=operator, was=source[first:end], now=text)
                result.append(row | dict(code=code, lines=lines))
    return result


# --------------------------------------------------------------------------------------------------- tests


def record(tree: Path, work: Path) -> None:
    """Run the suite once; write {file: {line: tests}} to lines.json and {test: seconds} to seconds.json."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mutants_plugin.py").write_text(PLUGIN, encoding="utf-8")
        Path(folder, "coverage.ini").write_text(COVERAGE, encoding="utf-8")
        data, seconds = Path(folder, "data"), (work / "seconds.json").resolve()
        given = dict(PYTHONPATH=folder, MUTANTS_TEST=IMPORT, MUTANTS_DATA=data, MUTANTS_SECONDS=seconds)
        run = ["coverage", "run", f"--rcfile={folder}/coverage.ini", "-m", "pytest", "-p", "mutants_plugin"]
        environment = os.environ | {name: str(value) for name, value in given.items()}
        subprocess.run([sys.executable, "-m", *run], cwd=tree, env=environment)
        failed = {test for test, time in json.loads(seconds.read_text()).items() if time == float("inf")}
        if failed:  # what fails without a change tells nothing of one
            print("left out, for they fail:", *sorted(failed), sep="\n  ", flush=True)
        covered = collections.defaultdict(lambda: collections.defaultdict(set))
        for path in Path(folder).glob("data.*"):
            with contextlib.closing(sqlite3.connect(path)) as database:
                files = dict(database.execute("select id, path from file"))
                contexts = dict(database.execute("select id, context from context"))
                # In the suite's own process coverage puts the context it began with before that of a test.
                contexts = {key: text.removeprefix(f"{IMPORT}|") for key, text in contexts.items()}
                for file, context, bits in database.execute(LINES):
                    name = os.path.relpath(files[file], tree)
                    for line in numbits_to_nums(bits) if contexts[context] not in failed else ():
                        covered[name][str(line)].add(contexts[context])
    lists = {file: {line: sorted(tests) for line, tests in lines.items()} for file, lines in covered.items()}
    (work / "lines.json").write_text(json.dumps(lists), encoding="utf-8")


class Killer:
    """A plugin of pytest that writes down which test failed."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.path.write_text(report.nodeid, encoding="utf-8")


def run_tests(tree: Path, tests: list[str], limit: float, killer: Path) -> str:
    """Run them in a forked process, to the first that fails -> "passed", "failed" or "hung"."""
    killer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            # Two changes of one length within a second would pass for one file in a cache of bytecode.
            sys.dont_write_bytecode = True
            os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            import pytest

            status = pytest.main(["-x", "-p", "no:cacheprovider", *tests], plugins=[Killer(killer)])
        finally:
            os._exit(int(status))
    deadline, ended = time.monotonic() + limit, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):  # and whatever it has started
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return "hung"
    return "failed" if status else "passed"


class Judge:
    """Tries the mutants of one file; `results`: where its rows are kept, a line of JSON each."""

    def __init__(self, name: str, tree: Path, results: Path, covered: dict, seconds: dict):
        self.name, self.path, self.tree, self.results = name, tree / name, tree, results
        self.covered, self.seconds = covered, seconds
        text = results.read_text(encoding="utf-8") if results.exists() else ""
        self.rows = [json.loads(line) for line in text.splitlines()]
        self.kills = collections.Counter(row["by"] for row in self.rows if row["by"])

    def verdict(self, mutant: dict) -> dict:
        """Run the mutant's tests -> `verdict`, `by` which test it died, how many `tests` run it."""
        tests = set().union(*(self.covered.get(str(line), ()) for line in mutant["lines"]))
        if IMPORT in tests:
            tests = set().union(*self.covered.values()) - {IMPORT}
        killers = [test for test, _ in self.kills.most_common() if test in tests][:4]
        rest = sorted(tests - set(killers), key=lambda test: self.seconds.get(test, 0))
        note = self.tree.parent / "killer"
        for part in filter(None, (killers, rest[:30], rest[30:])):
            limit = 40 + 6 * sum(self.seconds.get(test, 0) for test in part)
            verdict = run_tests(self.tree, part, limit, note)
            if verdict != "passed":
                by = note.read_text(encoding="utf-8") if note.exists() else None
                return dict(verdict=verdict, by=by, tests=len(tests))
        return dict(verdict="survived" if tests else "no test", by=None, tests=len(tests))

    def run(self, sample: int) -> None:
        """All mutants, or so many by chance, but for those judged before."""
        source = self.path.read_text(encoding="utf-8")
        every = mutants(source)
        chosen = every if sample >= len(every) else random.Random(0).sample(every, sample)
        print(f"{self.name}: {len(every)} mutants, {len(chosen)} chosen", flush=True)
        done = [{key: row[key] for key in WHAT} for row in self.rows]
        every_test = set().union(*self.covered.values()) - {IMPORT}
        quick = sorted(every_test, key=lambda test: self.seconds.get(test, 0))[:20]
        if run_tests(self.tree, quick, 600, self.tree.parent / "killer") != "passed":
            raise SystemExit(f"{self.name}: its tests fail without a change: {' '.join(quick)}")
        for mutant in chosen:
            what = {key: mutant[key] for key in WHAT}
            if what in done:
                continue
            self.path.write_text(mutant["code"], encoding="utf-8")
            row = what | self.verdict(mutant)
            self.path.write_text(source, encoding="utf-8")
            self.rows.append(row)
            self.kills[row["by"]] += row["by"] is not None
            with self.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if row["verdict"] in ("survived", "no test"):
                print(f"{self.name}:{row['line']}: {row['verdict']} ({row['tests']} tests)")
                print(f"  - {row['was']}\n  + {row['now']}", flush=True)
        print(self.name, dict(collections.Counter(row["verdict"] for row in self.rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for what was found")
    parser.add_argument("--sample", type=int, default=10**6, help="so many mutants of each file, by chance")
    parser.add_argument("files", nargs="+", help="relative to the project's folder")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    with tempfile.TemporaryDirectory(dir=args.work.resolve()) as folder:
        tree = Path(folder, "main")
        subprocess.run(["git", "clone", "-q", ROOT, tree], check=True)
        if (ROOT.parent / "shared").exists():  # some tests need ../shared
            Path(folder, "shared").symlink_to(ROOT.parent / "shared")
        if not (args.work / "lines.json").exists():
            record(tree, args.work)
        covered, seconds = (
            json.loads((args.work / name).read_text(encoding="utf-8"))
            for name in ("lines.json", "seconds.json")
        )
        for module in HEAVY:
            importlib.import_module(module)
        for name in args.files:
            results = args.work / (name.replace("/", "_") + ".jsonl")
            Judge(name, tree, results, covered.get(name, {}), seconds).run(args.sample)


if __name__ == "__main__":
    main()
