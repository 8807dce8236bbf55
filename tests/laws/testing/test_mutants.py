"""The program of mutants changes one place of a source at a time, never a text, and tells killed from survived."""

import ast
import sys

import pytest
from programs import mutants

SOURCE = '''
"""A module."""
LIMIT = 3
def f(x: int = 2, *, deep: bool = True) -> "int":
    """Return a number."""
    if x < 1 and deep:
        check(x, f"{x + 1} of 4")
    x += 1
    return -x if not deep else x * LIMIT
'''


@pytest.fixture
def every(tmp_path):
    path = tmp_path / "it.py"
    path.write_text(SOURCE)
    return list(mutants.mutants_of(path))


def test_each_mutant_is_one_change_of_code(every):
    """Every operator, number, branch and statement has a mutant, which differs from the source and compiles. Texts,
    annotations and docstrings have none."""
    lines = {line for line, _ in enumerate(SOURCE.splitlines(), 1)}
    assert {m.line for m in every} <= lines
    assert sorted(m.change for m in every) == sorted(
        ["constant"] * 5 + ["boolean", "comparison", "branch", "branch", "statement", "statement", "sign", "sign",
                            "arithmetic"])  # fmt: skip
    plain = ast.unparse(ast.parse(SOURCE))
    texts = [ast.unparse(mutants.mutated(m)) for m in every]
    assert len({plain, *texts}) == len(texts) + 1
    assert all('f"{x + 1} of 4"' in t or "check" not in t for t in (t.replace("'", '"') for t in texts))
    for m in every:
        compile(mutants.mutated(m), "it.py", "exec")


def test_a_description_shows_both_forms(every):
    """A line has the file, the place, the code and the code that is run in its place."""
    text = next(mutants.described(m) for m in every if m.change == "comparison")
    assert text.endswith("it.py:6 comparison: x < 1 -> x <= 1")


def test_tests_of_the_changed_file_come_first(tmp_path):
    """Files of tests whose names have a word of the changed file's come first."""
    for name in ("test_a.py", "test_b_c.py", "test_d.py"):
        (tmp_path / name).write_text("")
    assert [p[-6:] for p in mutants.ordered([str(tmp_path)], "_c_keyed")] == ["b_c.py", "t_a.py", "t_d.py"]


def test_tests_by_lines(tmp_path):
    """With traced lines a mutant gets the tests that run its line, the likeliest and the quickest first, up to a sum of
    seconds. A line of the import gets those of its file, and a line that no test runs gets none."""
    path = tmp_path / "_deep.py"
    path.write_text("LIMIT = 3\ndef f(x):\n    y = (x,\n         2)\n    return y\ndef g():\n    return 4\n")
    tests = ["test_a.py::long", "test_a.py::short", "test_deep.py::it"]
    traced = {"tests": tests, "seconds": [9.0, 1.0, 2.0], "found": {str(path): {"3": [0, 1, 2], "5": [0, 1, 2]}}}
    of_lines = lambda most_s: {m.line: mutants.covering(m, traced, most_s) for m in mutants.mutants_of(path)}
    every = (["test_deep.py::it", "test_a.py::short", "test_a.py::long"], 12.0)
    assert of_lines(100) == {1: every, 4: every, 7: ([], 0)}
    assert of_lines(3.5)[4] == (every[0][:2], 3.0)
    assert of_lines(0)[4] == (every[0][:1], 2.0)


def test_a_trace_has_the_lines_of_its_files(tmp_path):
    """A trace has each line that ran of the files that it was made for, and no other line."""
    path = tmp_path / "it.py"
    path.write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    names, lines = {}, mutants.Lines([path])
    exec(compile(path.read_text(), str(path), "exec"), names)
    sys.settrace(lines.called)
    try:
        names["f"](0), ast.parse("x")
    finally:
        sys.settrace(None)
    assert lines.seen == {(str(path), n) for n in (1, 2, 4)}
