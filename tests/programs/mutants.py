"""Mutants of a folder of the library: each has one change of its source, and a law of the folder must fail.

    PYTHONPATH=tests .venv/bin/python -m programs.mutants funcrec/jagged --tests tests/laws/jagged --sample 150

A change is another comparison, arithmetic or boolean operation, a number plus one, a branch that is not taken, or a
statement left out. Texts, annotations and docstrings are not changed. The mutants are drawn by the seed. Each runs in a
process of its own, forked before the library is imported. One that takes more than `--limit` processor seconds is late.
The lines say which mutants survive; a person judges whether a law is missing or nothing observable has changed.
"""

import argparse
import ast
import copy
import functools
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
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


def run(it: Mutant, tests: list[str], limit_s: int) -> str:
    """Run the tests against the mutant in a fork: the outcome."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1), os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        os._exit(_tested(it, tests))
    _, status = os.waitpid(child, 0)
    return SURVIVED if status == 0 else LATE if os.WIFSIGNALED(status) else KILLED


def ordered(tests: list[str], name: str) -> list[str]:
    """Return the files of tests, first those whose names have a word of the changed file's name."""
    files = [f for t in map(Path, tests) for f in (sorted(t.rglob("test_*.py")) if t.is_dir() else [t])]
    words = set(name.strip("_").split("_"))
    return [str(f) for f in sorted(files, key=lambda f: -len(words & set(f.stem.split("_"))))]


def _tested(it: Mutant, tests: list[str]) -> int:
    import pytest

    code, original, target = compile(mutated(it), str(it.path), "exec"), SourceFileLoader.get_code, it.path.resolve()
    SourceFileLoader.get_code = lambda self, name: code if Path(self.path) == target else original(self, name)
    try:
        return int(pytest.main(["-x", "-q", "-n", "0", "--alone", "-p", "no:cacheprovider", *tests]))
    except BaseException:
        return 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m programs.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders whose source changes")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest runs")
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=90, help="processor seconds for a mutant")
    parser.add_argument("--list", action="store_true", help="the mutants, which are not run")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the mutants of the sample that are run")
    options = parser.parse_args()
    files = [f for p in options.paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    every = [m for f in files for m in mutants_of(f)]
    chosen = sorted(random.Random(options.seed).sample(every, min(options.sample, len(every))))
    print(f"{len(chosen)} of {len(every)} mutants of {len(files)} files, seed {options.seed}", flush=True)
    if not options.list:
        _import()
    found = Counter()
    for i, it in enumerate(chosen):
        if options.only and i not in options.only:
            continue
        outcome = "listed" if options.list else run(it, ordered(options.tests, it.path.stem), options.limit)
        found[outcome] += 1
        if outcome != KILLED:
            print(f"{i}: {outcome}: {described(it)}", flush=True)
    print(dict(found))


def _import() -> None:
    """Import what the tests need besides the library, and let failing tests end at once: no shrinking."""
    import hypothesis
    import torch  # noqa: F401

    how = {"derandomize": True, "deadline": None, "max_examples": 25, "database": None}
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutants", phases=phases, suppress_health_check=[hypothesis.HealthCheck.too_slow], **how
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    assert "funcrec" not in sys.modules


if __name__ == "__main__":
    main()
