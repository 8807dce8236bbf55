"""What every public call does under `invariant`: right, in its eager and its compiled bits, or an error with words.

A call is right if its floats are near to those of the plain call, if a second call and a call of the compiled program
have its bits, and if its numbers are not those of `public_values`, whose sums are exact: they are noisy here.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import funcrec as fr
from funcrec.core import map_tensors, tree_leaves
from funcrec.testing import assert_trees_close
from programs.public_values import Call

RIGHT, NONE = "right", "no floats"
RAISES = {  # {name: words of its error}
    ".search_index": "FAISS sums in an order of its own",
    ".lanczos": "aten._linalg_eigh",
    ".pipeline_run": "need  a plain loop over batches",
    ".stale_run": "need  a plain loop over batches",
    ".dry_run": "a program of `lower` has something to follow it",
    "data.load": "a result computes after the call",
    "Package.call": "the order of a package's sums is fixed already",
}
NOT_HERE = {  # {name: why}
    ".pytree": "a class becomes a tree once",
    ".file_store": "a folder is open once",
    ".table_store": "a folder is open once",
    "testing.assert_trees_close": "compares two trees, which noise makes unequal",
    ".rewind": "of a state and its log, which noise parts",
    ".delta": "of a state and its log, which noise parts",
}
# Results that are read from files or a clock, whose shapes follow values, or that hold ranks' parts: no program.
OF_THE_HOST = """
    data. metrics.exact metrics.grouped interop. testing. loop. Package. .load .predict .cached .store_ .fit .eval_shape
    .SweepTable .sweep_table .dynamic_tables .renew .grow .of_rows .hvp_fn .gauss_newton_fn .fisher_fn .example_grad_fn
    .private_ .flush .apply_delta .shard .unshard .gather_ .reshard .sync_replicas .sharded_getitem
    .step_on_mesh .towers_
"""


def noisy(x: Any, seed: int = 0) -> Any:
    """Return a float tensor whose sums depend on their order. Labels of 0 and 1 stay as they are."""
    if type(x) is not Tensor or not x.is_floating_point() or x.is_meta or x.layout != torch.strided:
        return x
    if set(x.unique().tolist()) == {0.0, 1.0}:
        return x
    draw = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    return x * (0.7 + 0.25 * draw)


def floats(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]


@contextlib.contextmanager
def quiet():
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(call: Call) -> str:
    """Return RIGHT, NONE, or the error or the difference in words."""
    good = map_tensors(noisy, call.good)
    with quiet():
        want = floats(call.fn(**good))
        try:
            got = floats(fr.invariant(call.fn)(**good))
        except Exception as error:
            return str(error)
    try:
        assert_trees_close(got, want, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        return f"differs: {error}"
    return RIGHT if want else NONE


def is_of_the_host(call: Call) -> bool:
    return call.name.startswith(tuple(OF_THE_HOST.split()))


def compiled(calls: Iterable[Call]) -> dict[str, str]:
    """Return {name: difference} of the calls whose program, one for all of them, has other bits than the eager call."""
    good = {c.name: map_tensors(noisy, c.good) for c in calls}
    fns = {c.name: c.fn for c in calls}
    given = {name: [x for x in tree_leaves(g) if type(x) is Tensor] for name, g in good.items()}
    program = fr.jit(lambda xs: {n: floats(fr.invariant(put(fns[n], good[n]))(xs[n])) for n in xs})
    wrong = {}
    with quiet():
        found = program(given)
        for name, fn in fns.items():
            try:
                assert_trees_close(found[name], floats(fr.invariant(fn)(**good[name])), rtol=0, atol=0)
            except AssertionError as error:
                wrong[name] = str(error)
    return wrong


def put(fn: Callable, good: dict) -> Callable:
    """Return fn as a function of the tensors in its arguments."""

    def run(tensors: list[Tensor]) -> Any:
        left = iter(tensors)
        return fn(**map_tensors(lambda x: next(left) if type(x) is Tensor else x, good))

    return run
