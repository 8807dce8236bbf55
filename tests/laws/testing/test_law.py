"""law makes a test of each law and transform; pytest collects them; each wrong function fails the test of its error."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import law, law_tests
from funcrec.testing import strategies as frs

ROOT = Path(__file__).parents[3]
BAGS = frs.jagged_tensors(dtypes=(torch.float64,), weighted=False)
FIRST = {"grad", "jvp", "vmap of grad", "hessian"}


def sums(x):
    return [sum(bag) for bag in x.to_lists()]


def failing(f):
    """Return the names of the tests of f that fail."""
    found = set()
    for name, test in law_tests(f).items():
        try:
            test()
        except AssertionError:
            found.add(name)
    return found


def under(**how):
    return law(BAGS, reference=sums, modes=[*FIRST, "vmap"], **how)


def test_a_right_function_passes_all():
    """A function that is right passes each test, and is called as before."""
    f = under()(lambda x: fr.bag_reduce(x, "sum"))
    assert failing(f) == set() and f(fr.JaggedTensor.from_lists([[1.0, 2.0], []])).tolist() == [3.0, 0.0]
    assert list(law_tests(f)) == ["value", "padding", "arguments", *FIRST, "vmap"]


def test_arguments_need_not_be_tensors():
    """A number, a string and None are arguments as others are, in each test."""
    draws = BAGS, st.integers(2, 3), st.sampled_from(["sum", None])
    by_lists = lambda x, n, how: [n * s for s in sums(x)]
    f = law(*draws, reference=by_lists, modes=["grad"])(lambda x, n, how: n * fr.bag_reduce(x, how or "sum"))
    assert failing(f) == set()


def no_last(x):
    return fr.bag_reduce(x, "sum")[: max(x.num_bags - 1, 0)]


def writes(x):
    out = fr.bag_reduce(x, "sum")
    x.values.data.zero_()
    return out


def reads_padding(x):
    whole = torch.cat([x.values.new_zeros(1), x.values.cumsum(0)])
    return whole[x.offsets[1:].long()] - whole[x.offsets[:-1].long()] + (whole[-1] - whole[x.offsets[-1].long()]) * 1e-9


def detached(x):
    return fr.bag_reduce(fr.JaggedTensor(x.values.detach(), x.offsets), "sum")


@pytest.mark.parametrize(
    ("f", "some"),
    [
        (no_last, {"value"}),
        (lambda x: fr.bag_reduce(x, "sum") + 1e-3, {"value"}),
        (writes, {"arguments"}),
        (reads_padding, {"padding"}),
        (detached, FIRST - {"hessian"}),
    ],
)
def test_a_wrong_function_fails_the_test_of_its_error(f, some):
    """A bag left out, a rounding, a write, a read of padding, a lost gradient: their tests fail."""
    assert some <= failing(under()(f)), failing(under()(f))


def test_the_example_has_the_bags_that_break_derivatives():
    """The drawn example has an empty bag and a bag of one value: √variance has no derivative there, which is found."""

    def deviations(x):
        square = fr.bag_reduce(fr.JaggedTensor(x.values**2, x.offsets), "mean")
        return (square - fr.bag_reduce(x, "mean") ** 2).clamp(min=0).sqrt()

    def by_lists(x):
        means = [sum(b) / max(len(b), 1) for b in x.to_lists()]
        return [
            (sum((v - m) ** 2 for v in b) / max(len(b), 1)) ** 0.5 for b, m in zip(x.to_lists(), means, strict=True)
        ]

    made = law(BAGS, reference=by_lists, modes=["grad", "vmap"])(deviations)
    assert failing(made) == {"grad"}
    full = (fr.JaggedTensor.from_lists([[1.0, 2.5], [3.0, 4.0, 4.5]], dtype=torch.float64),)
    assert failing(law(BAGS, reference=by_lists, modes=["grad", "vmap"], example=full)(deviations)) == set()


def test_values_of_all_kinds_are_compared():
    """Jagged values are compared as lists, pooled features by key, row gradients as dense ones, NaN with NaN."""
    ids = frs.keyed_jagged_tensors(keys=["a", "b"], weighted=False)
    flip = lambda x: {k: x.to_lists()[k] for k in "ba"}
    assert failing(law(ids, reference=flip, modes=[])(lambda x: x.permute(["b", "a"]))) == set()
    assert failing(law(ids, reference=flip, modes=[])(lambda x: x.permute(["b"]))) == {"value"}
    none = law(st.just(torch.zeros(2)), reference=lambda x: (float("nan"), {"a": [0.0, 0.0]}), modes=[])
    assert failing(none(lambda x: (torch.tensor(torch.nan), fr.KeyedTensor(x[None], ("a",), (2,))["a"][0]))) == {
        "value"
    }
    assert failing(none(lambda x: [x.sum() / 0, {"a": x}])) == set()
    of_rows = law(frs.row_grads(), reference=lambda g: g.to_dense(), modes=[], rtol=0, atol=0)
    assert failing(of_rows(lambda g: g)) == set() and failing(of_rows(lambda g: g.scale(2.0))) == {"value"}


def test_bad_input():
    """Arguments that are not strategies, no strategies, unknown modes and functions without a law are refused."""
    with pytest.raises(TypeError, match=r"`draws` are not strategies[\s\S]*draws\[1\]: i"):
        law(BAGS, 3, reference=sums)
    with pytest.raises(TypeError, match="`draws` are not strategies"):
        law(reference=sums)
    with pytest.raises(ValueError, match="`modes` has no transform's name"):
        law(BAGS, reference=sums, modes=["gradd"])
    with pytest.raises(ValueError, match="`may_raise` has no transform's name"):
        law(BAGS, reference=sums, may_raise=["gradd"])
    with pytest.raises(TypeError, match="`f` has no law"):
        law_tests(sums)


def collected(folder, *options):
    """Run pytest, with the plugin that is installed, in a folder, and return its output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    return done.stdout + done.stderr


MINE = """
import torch
from hypothesis import Phase, settings
from funcrec.testing import law, strategies as frs

settings.register_profile("few", max_examples=3, database=None, phases=[Phase.generate])
settings.load_profile("few")

@law(frs.tensors((2,), dtype=torch.float64), reference=lambda x: [2 * v for v in x.tolist()], modes=["grad", "jvp"])
def twice(x):
    return x + x.detach()

half = law(frs.tensors((2,)), reference=lambda x: x / 2, modes=[])(lambda x: x * 0.5)

def test_other():
    assert twice(torch.ones(1)) == 2
"""


def test_pytest_collects_the_tests_by_name(tmp_path):
    """The plugin gives each law and transform a test with a name that -k selects; other tests are collected as ever."""
    (tmp_path / "test_mine.py").write_text(MINE)
    out = collected(tmp_path, "-rA", "-k", "not arguments")
    ok = ("twice[value]", "twice[padding]", "half[value]", "half[padding]", "test_other")
    assert all(f"PASSED test_mine.py::{name}" in out for name in ok), out
    assert all(f"FAILED test_mine.py::twice[{mode}]" in out for mode in ("grad", "jvp"))
    assert "2 failed, 5 passed, 2 deselected" in out and "args[0] under grad: got" in out


def test_a_run_without_laws_imports_no_torch(tmp_path):
    """pytest's own runs stay as fast as they are: the plugin imports neither funcrec nor torch nor hypothesis."""
    (tmp_path / "test_none.py").write_text(
        "import sys\ndef test_none():\n    assert not {'torch', 'funcrec'} & set(sys.modules)\n"
    )
    assert "1 passed" in collected(tmp_path)


def test_the_plugin_is_installed_by_its_name():
    """The entry point names the plugin, which lies beside the package where it is installed."""
    (found,) = [x for x in importlib.metadata.entry_points(group="pytest11") if x.name == "funcrec"]
    assert found.value == "pytest_funcrec"
    assert Path(found.load().__file__).parts[-3:] == ("testing", "pytest_funcrec", "__init__.py")
