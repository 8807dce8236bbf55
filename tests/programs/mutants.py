"""Mutants of a folder of the library: each has one change of its source, and a law of the folder must fail.

    PYTHONPATH=tests .venv/bin/python -m programs.mutants funcrec/jagged --tests tests/laws/jagged --sample 150

A change is another comparison, arithmetic or boolean operation, a number plus one, a branch that is not taken, or a
statement left out. Texts, annotations and docstrings are not changed. The mutants are drawn by the seed. Each runs in a
process of its own, forked before the library is imported. One that takes more than `--limit` processor seconds is late.
The lines say which mutants survive; a person judges whether a law is missing or nothing observable has changed.

    ... --trace LINES          runs the tests once without a mutant, and writes which tests run which lines
    ... --lines LINES          runs for each mutant only the tests that run its line: the likeliest first, then the
                               quickest, and of these no more than take `--seconds`

With `--lines` a mutant of a line that no test runs survives at once. Tests are collected once; each mutant of a
function runs in a fork of that process, where the function gets other code.
"""

import argparse
import ast
import copy
import functools
import itertools
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
KILLED, SURVIVED, LATE = "killed", "survived", "late"
LATE_SIGNALS = signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM
MOST_BYTES = 6 << 30  # of a mutant, whose sizes may be anything
HOW = ["-q", "-n", "0", "--alone", "-p", "no:cacheprovider"]
QUICK_S = 20  # a traced test that takes longer is left out


@functools.cache
def source_of(path: Path) -> str:
    """Return the text of a file, read once: the file may change while mutants run."""
    return path.read_text()


class Mutant(NamedTuple):
    """The number of a node of a file, in the order of `ast.walk`, and what changes there."""

    path: Path
    node: int
    line: int
    change: str


def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (what changes, the other node) for each mutation of a node."""
    other = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        other.ops[0] = COMPARED[type(node.ops[0])]()
        yield "comparison", other
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not _is_text(node):
        other.op = COMPUTED[type(node.op)]()
        yield "arithmetic", other
    elif isinstance(node, ast.BoolOp):
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "boolean", other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert, ast.USub)):
        yield "sign", other.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        other.value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "constant", other
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        other.test = ast.UnaryOp(ast.Not(), other.test)
        yield "branch", other
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and not _is_doc(node)):
        yield "statement", ast.Pass()


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(x, (ast.JoinedStr, ast.Constant)) and not isinstance(getattr(x, "value", 0), (int, float))
               for x in (node.left, node.right))  # fmt: skip


def _is_doc(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _quiet(tree: ast.AST) -> set[int]:
    """Return the ids of nodes that are texts, annotations or types: parts of f-strings, of hints, of declarations."""
    out = set()
    for node in ast.walk(tree):
        parts = [node] if isinstance(node, ast.JoinedStr) else []
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parts += [a.annotation for a in args if a.annotation] + [x for x in [getattr(node, "returns", None)] if x]
        if isinstance(node, ast.AnnAssign):
            parts.append(node.annotation)
        if isinstance(node, ast.Assign) and "Annotated" in ast.dump(node.value)[:80]:
            parts.append(node.value)
        out |= {id(x) for part in parts for x in ast.walk(part)}
    return out


def mutants_of(path: Path) -> Iterator[Mutant]:
    tree = ast.parse(source_of(path))
    quiet = _quiet(tree)
    for i, node in enumerate(ast.walk(tree)):
        if id(node) not in quiet:
            yield from (Mutant(path, i, getattr(node, "lineno", 0), change) for change, _ in changed(node))


def mutated(it: Mutant) -> ast.Module:
    """Return the tree of the file with the change."""
    tree = ast.parse(source_of(it.path))
    nodes = list(ast.walk(tree))
    old, new = nodes[it.node], dict(changed(nodes[it.node]))[it.change]
    for parent in nodes:
        for name, field in ast.iter_fields(parent):
            if field is old:
                setattr(parent, name, ast.copy_location(new, old))
            elif isinstance(field, list) and any(x is old for x in field):
                field[next(i for i, x in enumerate(field) if x is old)] = ast.copy_location(new, old)
    return ast.fix_missing_locations(tree)


def described(it: Mutant) -> str:
    """Return the file, the line, and the code before and after."""
    tree = ast.parse(source_of(it.path))
    old = list(ast.walk(tree))[it.node]
    one = lambda node: " ".join(ast.unparse(node).split())[:90]
    head = lambda node: f"if {one(node.test)}" if isinstance(node, (ast.If, ast.While)) else one(node)
    new = ast.fix_missing_locations(dict(changed(old))[it.change])
    return f"{it.path}:{it.line} {it.change}: {head(old)} -> {head(new)}"


def run(tested: Callable[[], int], limit_s: int) -> str:
    """Return the outcome of a fork in which `tested` returns 0 if no test failed."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1), os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        signal.alarm(6 * limit_s)  # one that waits takes no processor time
        try:
            os._exit(tested())
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in LATE_SIGNALS
    return SURVIVED if status == 0 else LATE if is_late else KILLED


def ordered(tests: list[str], name: str) -> list[str]:
    """Return the files of tests, first those whose names have a word of the changed file's name."""
    files = [f for t in map(Path, tests) for f in (sorted(t.rglob("test_*.py")) if t.is_dir() else [t])]
    words = set(name.strip("_").split("_"))
    return [str(f) for f in sorted(files, key=lambda f: -len(words & set(f.stem.split("_"))))]


class Lines:
    """A plugin of pytest: {file: {line: tests that pass and run the line}}, and each test's processor seconds."""

    def __init__(self, files: list[Path]):
        self.found = {str(f.resolve()): {} for f in files}
        self.tests, self.seconds, self.seen, self.passed = [], [], set(), False

    def pytest_runtest_logreport(self, report) -> None:
        self.passed = report.passed and (self.passed or report.when == "setup")

    def pytest_runtest_protocol(self, item, nextitem):
        from _pytest.runner import runtestprotocol

        self.seen, start = set(), time.process_time()
        threading.settrace(self.called), sys.settrace(self.called)
        try:
            runtestprotocol(item, nextitem=nextitem)
        finally:
            sys.settrace(None), threading.settrace(None)
        taken = time.process_time() - start
        if self.passed and taken < QUICK_S:
            for file, line in self.seen:
                self.found[file].setdefault(line, []).append(len(self.tests))
            self.tests.append(item.nodeid), self.seconds.append(round(taken, 3))
        return True

    def called(self, frame, event: str, arg):
        return self.line(frame, event, arg) if frame.f_code.co_filename in self.found else None

    def line(self, frame, event: str, arg):
        self.seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self.line

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"tests": self.tests, "seconds": self.seconds, "found": self.found}))


def covering(it: Mutant, traced: dict, most_s: float) -> tuple[list[str], float]:
    """Return tests that run the mutant's line, the likeliest first, then the quickest, and their processor seconds.

    All tests of the file stand for a line that runs when the file is imported.
    """
    found, (line, runs_in_call) = traced["found"].get(str(it.path.resolve()), {}), _place(it)
    chosen = found.get(str(it.line)) or found.get(str(line), [])
    if not chosen and not runs_in_call:
        chosen = {t for tests in found.values() for t in tests}
    words = set(it.path.stem.strip("_").split("_"))
    is_other = lambda t: not words & set(Path(traced["tests"][t].split("::")[0]).stem.split("_"))
    order = sorted(chosen, key=lambda t: (is_other(t), traced["seconds"][t]))
    until = list(itertools.accumulate(traced["seconds"][t] for t in order))
    num = max(sum(s <= most_s for s in until), min(len(order), 1))
    return [traced["tests"][t] for t in order[:num]], until[num - 1] if num else 0


def _place(it: Mutant) -> tuple[int, bool]:
    """Return the first line of the statement around a mutant, and whether it runs in a call, not at the import."""
    nodes = list(ast.walk(ast.parse(source_of(it.path))))
    holders = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
    node, line, runs_in_call = nodes[it.node], 0, False
    while node is not None:
        line = line or (node.lineno if isinstance(node, ast.stmt) else 0)
        holder = holders.get(id(node))
        body = getattr(holder, "body", ()) if isinstance(holder, (ast.FunctionDef, ast.Lambda)) else ()
        runs_in_call |= node is body or (isinstance(body, list) and node in body)
        node = holder
    return line, runs_in_call


def _tested(it: Mutant, tests: list[str]) -> int:
    import pytest

    code, original, target = compile(mutated(it), str(it.path), "exec"), SourceFileLoader.get_code, it.path.resolve()
    SourceFileLoader.get_code = lambda self, name: code if Path(self.path) == target else original(self, name)
    return int(pytest.main(["-x", *HOW, *tests]))


class Forks:
    """A plugin of pytest that runs mutants in place of all tests, each with its own tests, in a fork.

    mutants: (number, mutant, ids of tests, processor seconds). told: is called with each outcome."""

    def __init__(self, mutants: list[tuple[int, Mutant, list[str], int]], told: Callable):
        self.mutants, self.told, self.failed = mutants, told, False

    def pytest_runtest_logreport(self, report) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session) -> bool:
        import gc

        gc.unfreeze()  # of what is frozen, get_objects has nothing
        functions = [x for x in gc.get_objects() if isinstance(x, FunctionType)]
        session.config.pluginmanager.unregister(name="terminalreporter")
        items = {x.nodeid: x for x in session.items}
        for number, it, tests, limit_s in self.mutants:
            tested = functools.partial(self.tested, it, [items[t] for t in tests], functions)
            self.told(number, it, run(tested, limit_s), len(tests))
        return True

    def tested(self, it: Mutant, items: list, functions: list[FunctionType]) -> int:
        from _pytest.runner import runtestprotocol

        codes = changed_codes(it)
        for function in functions:
            if function.__code__ in codes and Path(function.__code__.co_filename) == it.path.resolve():
                function.__code__ = codes[function.__code__]
        for item, following in itertools.zip_longest(items, items[1:]):
            runtestprotocol(item, nextitem=following)
            if self.failed:
                return 1
        return 0


def changed_codes(it: Mutant) -> dict[CodeType, CodeType]:
    """Return {code of a function: its code with the change}, or {} if the change is at the top of the file."""
    inner = lambda code: [y for x in code.co_consts if isinstance(x, CodeType) for y in (x, *inner(x))]
    name = str(it.path.resolve())
    old, new = (inner(compile(x, name, "exec", dont_inherit=True)) for x in (source_of(it.path), mutated(it)))
    is_inside = _place(it)[1] and [x.co_freevars for x in old] == [x.co_freevars for x in new]
    return {a: b for a, b in zip(old, new, strict=True) if a != b} if is_inside else {}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m programs.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders whose source changes")
    parser.add_argument("--tests", nargs="+", default=[], help="what pytest runs")
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=90, help="processor seconds for a mutant")
    parser.add_argument("--list", action="store_true", help="the mutants, which are not run")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the mutants of the sample that are run")
    parser.add_argument("--trace", type=Path, help="a file that gets the lines that each test runs; no mutant is run")
    parser.add_argument("--lines", type=Path, help="a file that --trace wrote, in place of --tests")
    parser.add_argument("--seconds", type=float, default=60, help="the most that the tests by --lines of a mutant take")
    options = parser.parse_args()
    files = [f for p in options.paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    if options.trace:
        return trace(files, options.tests, options.trace)
    traced = json.loads(options.lines.read_text()) if options.lines else None
    every = [m for f in files for m in mutants_of(f)]
    chosen = sorted(random.Random(options.seed).sample(every, min(options.sample, len(every))))
    print(f"{len(chosen)} of {len(every)} mutants of {len(files)} files, seed {options.seed}", flush=True)
    if not options.list:
        _import()
    found = Counter()

    def told(number: int, it: Mutant, outcome: str, num_tests: int) -> None:
        found[outcome] += 1
        if outcome != KILLED:
            print(f"{number}: {outcome}: {described(it)}  # {num_tests} tests", flush=True)

    later = []
    for i, it in enumerate(chosen):
        if options.only and i not in options.only:
            continue
        tests, limit_s = ordered(options.tests, it.path.stem), options.limit
        if traced:
            tests, seconds = covering(it, traced, options.seconds)
            limit_s += int(2 * seconds)
        if options.list or not tests:
            told(i, it, "listed" if options.list else SURVIVED, len(tests))
        elif traced and changed_codes(it):
            later.append((i, it, tests, limit_s))
        else:
            told(i, it, run(functools.partial(_tested, it, tests), limit_s), len(tests))
    if later:
        import pytest

        pytest.main(
            [*HOW, *sorted({t.split("::")[0] for _, _, tests, _ in later for t in tests})], [Forks(later, told)]
        )
    print(dict(found))


def trace(files: list[Path], tests: list[str], path: Path) -> None:
    """Run the tests once, and write which of them run which lines."""
    import pytest

    _import()
    lines = Lines(files)
    pytest.main([*HOW, *tests], plugins=[lines])
    lines.write(path)


def _import() -> None:
    """Import what the tests need besides the library, and let failing tests end at once: no shrinking."""
    import hypothesis
    import pytest  # noqa: F401
    import torch._dynamo
    import torch.fx.experimental.proxy_tensor  # noqa: F401

    how = {"derandomize": True, "deadline": None, "max_examples": 25, "database": None}
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutants", phases=phases, suppress_health_check=[hypothesis.HealthCheck.too_slow], **how
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    assert "funcrec" not in sys.modules


if __name__ == "__main__":
    main()
