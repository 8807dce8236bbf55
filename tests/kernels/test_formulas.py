"""The kernels' forms of the rules are generated from the built-in optimizers' formulas.

One new file adds an optimizer."""

import ctypes
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
import torch
from funcrec.kernels import formula, ops
from programs.update_calls import CASES
from torch import Tensor

import funcrec as fr
from funcrec.optim import write
from funcrec.optim._builtin import BUILTIN, arguments_of, builtin
from funcrec.optim._kernel import numbers_of

KERNELS = Path(ops.__file__).parent
F64 = torch.float64
ADADELTA = '''
"""AdaDelta, whose step may be cut to the length of a row."""

from funcrec.core import Share
from funcrec.optim._builtin import builtin, per_element, per_row
from funcrec.optim._row import Rate, RowOptimizer, norm, root


def _adadelta(row, grad, slots, hyper):
    square = hyper.rho * slots["square"] + (1 - hyper.rho) * grad.square()
    step = root(slots["delta"] + hyper.eps) / root(square + hyper.eps) * grad
    if hyper.is_cut:
        step = step * (norm(row) / norm(step)).clamp(max=1.0)
    delta = hyper.rho * slots["delta"] + (1 - hyper.rho) * step.square()
    return row - hyper.lr * step, {"square": square, "delta": delta, "age": slots["age"] + hyper.repeats / hyper.step}


@builtin(rule=_adadelta, slots=lambda hyper: {"square": per_element(), "delta": per_element(), "age": per_row()})
def adadelta(lr: Rate = 1.0, *, rho: Share = 0.9, eps: float = 1e-6, is_cut: bool = False) -> RowOptimizer:
    """v ← rho · v + (1 - rho) · g²;  u = √((d + eps) / (v + eps)) · g;
    d ← rho · d + (1 - rho) · u²;  w ← w - lr · u."""
'''
DRIVER = """#include "formulas.h"
using namespace funcrec;
extern "C" void update(
    float* w, const float* x, float** s, float* spare, int64_t dim, const double* n, const double* h) {
  with_rule<float>(%d, {n[0], n[1], h, nullptr}, [&](const auto& rule) {
    rule.template apply<0>(Row<float>{w, x, {s[0], s[1], s[2]}, spare, dim, float(n[2])});
  });
}
"""


def test_the_kernels_forms_are_those_of_the_formulas():
    """rules.py, formulas.h and formulas.py equal the output of `python -m funcrec.optim.write`."""
    for name, text in write.texts().items():
        assert (KERNELS / name).read_text() == text, f"{name} is of another day: python -m funcrec.optim.write"


@pytest.mark.parametrize(("rule", "options"), CASES, ids=str)
def test_a_formula_sees_what_derivatives_see(rule, options):
    """A rule is marked elementwise, or gradient-wise, exactly when no derivative crosses elements."""
    optimizer, own, hyper = getattr(fr.optim, rule)(**options), BUILTIN[rule], arguments_of(BUILTIN[rule], **options)[1]
    noise = torch.rand(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64) + 1
    slots = {
        k: 0.3 * (noise[2 + i] if s.is_wide else noise[3, i])
        for i, (k, s) in enumerate(own.slots(named(hyper)).items())
    }
    wide = [k for k, s in slots.items() if s.dim()]

    def run(row, grad, *given):
        one = torch.ones((), dtype=F64)
        new, written = own.rule(
            row, grad, slots | dict(zip(wide, given)), named({"lr": 0.1, "step": 3 * one, "repeats": one} | hyper)
        )
        return torch.stack([new, *(written[k] for k in wide)])

    arguments = noise[0], noise[1], *(slots[k] for k in wide)
    by = torch.func.jacrev(run, argnums=tuple(range(len(arguments))))(*arguments)
    is_apart = [not x[:, ~torch.eye(3, dtype=torch.bool)].any() for x in by]
    assert optimizer.is_elementwise == all(is_apart)
    assert optimizer.is_gradient_wise == all(is_apart[:1] + is_apart[2:])


def named(values: dict) -> object:
    return type("Values", (), values)


@pytest.fixture
def adadelta(tmp_path):
    """Yield an optimizer imported from a temporary file. After the test, the optimizer is removed."""
    path = tmp_path / "adadelta.py"
    path.write_text(ADADELTA)
    try:
        yield imported(path).adadelta
    finally:
        BUILTIN.pop("adadelta", None)


def imported(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GIVEN = {"rows": torch.tensor([2, 0, 2]), "grads": torch.tensor([[1.0, -2.0, 0.3], [0.5, 3.0, -1.0], [4.0, 0.1, 0.2]])}


def state(optimizer) -> tuple:
    """Return gradients, slots after some steps, and tables."""
    tables = {"t": torch.arange(12.0).view(4, 3) / 8}
    slots = {"t": {k: x + 0.25 for k, x in optimizer.init(tables)["t"].items()}}
    return {"t": fr.RowGrads.from_entries(**GIVEN, num_embeddings=4)}, slots, tables


def test_one_file_is_an_optimizer(adadelta, tmp_path, monkeypatch):
    """One file with a declaration and a rule makes an optimizer with its errors and flags, in torch, C++ and Triton.
    The other rules keep their numbers."""
    with pytest.raises(ValueError, match=r"(?s)`rho`.*0, 1"):
        adadelta(rho=2.0)
    with pytest.raises(ValueError, match=r"(?s)`rho`.*f\[\]"):
        adadelta(rho=torch.ones(2))
    texts, own = write.texts(), BUILTIN["adadelta"]
    rules = imported(written(tmp_path / "rules_now.py", texts["rules.py"])).RULES
    written(tmp_path / "formulas.h", texts["csrc/formulas.h"])
    written(tmp_path / "formulas.py", texts["triton/formulas.py"])
    assert list(rules) == [*ops.RULES, "adadelta"] and len(write.examples("adadelta")) == 2
    form = rules["adadelta"]
    assert (form.slots, form.wide, form.hyper) == (
        ("square", "delta", "age"),
        (True, True, False),
        ("rho", "eps", "is_cut"),
    )
    assert form.is_timed and form.counts_entries
    update = built(tmp_path, len(rules) - 1)
    for is_cut in (False, True):
        optimizer = adadelta(lr=0.5, is_cut=is_cut)
        assert optimizer.is_elementwise != is_cut
        # the compiled object has no kernel for the rule yet, so the rule runs as a user's rule
        assert not optimizer.is_gradient_wise
        given, hyper = state(optimizer), numbers_of(form, arguments_of(own, is_cut=is_cut)[1])
        want = leaves(optimizer.update(*given, 3, implementation="reference"))
        by_tensors = adadelta(
            lr=0.5, rho=torch.tensor(0.9, dtype=F64), eps=torch.tensor(1e-6, dtype=F64), is_cut=is_cut
        )
        assert near(leaves(by_tensors.update(*given, 3)), want)
        assert is_cut or near(leaves(optimizer.update(*given, 3, implementation="cpp")), want)
        assert near(by_cpp(update, hyper, given), want)
        assert near(by_triton(imported(tmp_path / "formulas.py"), rules, monkeypatch, hyper, given), want)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def leaves(updated) -> list[Tensor]:
    tables, slots = updated
    return [tables["t"], *slots["t"].values()]


def near(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(got, want, strict=True))


def built(folder: Path, number: int):
    """Return the compiled struct with that number, for one row."""
    written(folder / "driver.cpp", DRIVER % number)
    flags = ("-O0", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=off", f"-I{folder}", f"-I{KERNELS / 'csrc'}")
    command = [os.environ.get("CXX", "g++"), *flags, str(folder / "driver.cpp"), "-o", str(folder / "driver.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "driver.so")).update


def by_cpp(update, hyper: list[float], given) -> list[Tensor]:
    """Return the result of the generated struct, applied to each touched row."""
    grads, slots, tables = given
    out, spare = [x.clone() for x in leaves((tables, slots))], torch.zeros(3)
    summed, count, address = (
        grads["t"].to_dense(),
        torch.bincount(GIVEN["rows"], minlength=4),
        lambda x: ctypes.c_void_p(x.data_ptr()),
    )
    for row in GIVEN["rows"].unique():
        own = (ctypes.c_void_p * 3)(*(x[row].data_ptr() for x in out[1:]))
        numbers, h = torch.tensor([0.5, 4.0, count[row]], dtype=F64), torch.tensor(hyper, dtype=F64)
        arguments = (
            address(out[0][row]),
            address(summed[row]),
            own,
            address(spare),
            ctypes.c_int64(3),
            address(numbers),
            address(h),
        )
        update(*arguments)
    return out


def by_triton(formulas, rules, monkeypatch, hyper: list[float], given) -> list[Tensor]:
    """Return the result of the interpreter's fused update with these formulas."""
    from funcrec.kernels.triton import update

    monkeypatch.setattr(update, "formulas", formulas)
    monkeypatch.setattr(update, "RULES", rules)
    _, slots, tables = given
    out = [x.clone() for x in leaves((tables, slots))]
    numbers = torch.tensor(0.5, dtype=F64), torch.tensor(3), None, "adadelta", hyper
    update.fused_update_(
        out[:1], out[1:], [GIVEN["grads"]], [GIVEN["rows"]], [], [], [0, 0, 0, 0, -1, 0, 3, 0, 0, -1], *numbers
    )
    return out


def test_a_rule_without_a_formula_is_a_users():
    """A built-in rule that sorts has no formula. No kernel is generated for the rule. An update runs the Python
    rule."""
    rule = lambda row, grad, slots, hyper: (row - hyper.lr * grad.sort().values, slots)
    declare = lambda lr=0.5: None
    declare.__name__ = "sorted_sgd"
    try:
        optimizer = builtin(rule=rule, slots=lambda hyper: {})(declare)()
        grads, slots, tables = state(optimizer)
        new = optimizer.update(grads, slots, tables, 0, implementation="reference")[0]["t"]
        assert torch.equal(new[2], tables["t"][2] - 0.5 * (GIVEN["grads"][0] + GIVEN["grads"][2]).sort().values)
        with pytest.raises(formula.UnknownError, match="sort"):
            write.written(BUILTIN["sorted_sgd"])
    finally:
        del BUILTIN["sorted_sgd"]
