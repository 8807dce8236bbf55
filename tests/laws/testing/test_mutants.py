"""The program of mutants changes one place of a source at a time, never a text, and tells killed from survived."""

import ast

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
