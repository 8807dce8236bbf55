"""The sweep. Every public function of float tensors, and every kernel operation, has the right derivative or raises.

PYTHONPATH=tests python tests/laws/test_right_or_raises.py        counts the triples (function, input, mode)
"""

import types
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from funcrec.kernels import library
from programs.float_functions import ROWS, of_kernels, of_lookups, of_values
from programs.float_ranks import at_once
from programs.float_updates import of_dense, of_rows, of_steps
from torch.autograd import forward_ad

import funcrec as fr
from funcrec.testing._modes import FIRST, MODES, RAISED, RIGHT, SECOND, Case, count, draw, sweep

CASES = [*of_kernels(), *of_lookups(), *of_values(), *of_rows(), *of_dense(), *of_steps()]
COVERED = {c.name.split(" ")[0].split(".")[0] for c in CASES} | {c.name.split(" ")[0].split("(")[0] for c in CASES}
NOT_HERE = {
    "takes no float tensor, or only holds one": [
        "Codec", "CheckError", "DonatedError", "FeatureConfig", "Hash", "Initializer", "Mesh", "P", "Placement", "Plan",
        "TableConfig", "Hardware", "TableConstraint", "plan",
        "axis_index", "axis_size", "column_wise", "constant", "fold_in", "grid", "hash_rows", "init", "key", "modulo",
        "multiply_shift",
        "normal", "replicated", "row_wise", "split", "table_column_wise", "table_row_wise", "table_wise", "uniform",
        "xavier_normal",
        "Params", "TrainState", "TrainStep", "DenseShard", "pytree", "optim.DenseOptimizer", "optim.RowOptimizer",
        "optim.Stage",
    ],
    "writes and reads files": [
        "save", "load", "latest", "Saving", "save_safetensors", "load_safetensors", "write_delta",
        "export", "load_package", "save_weights", "Package", "publish", "update_server", "ColdStore", "file_store",
        "memory_store",
    ],
    "runs what it is given, and says numbers": ["fit", "Fitted", "evaluate", "evaluate_retrieval"],
    "runs what it is given: tests/compile/test_control.py has its laws": ["cond", "while_loop", "fori_loop"],
    "stages a function: tests/compile has its laws of tracked inputs": ["jit", "Lowered", "eval_shape", "debug_print"],
    "stages a step on shapes, and says numbers": ["dry_run", "DryRun"],
    "gradients of examples: per_example_grads, which is here, calls them all": [
        "sum_examples", "example_norms", "example_dots", "gradient_noise_scale", "private_grads",
    ],
    "second derivatives: of_rows, hvp and conjugate_gradient, which are here, call them or hold them": [
        "OfRows", "gauss_newton_product", "fisher_product", "lanczos", "Spectrum", "Solution",
    ],
    "runs a step or a loss, which is here": [
        "retry_overflow", "pipeline", "stale_pipeline", "accumulate_grads", "sweep", "sweep_table", "SweepTable",
    ],
    "adds noise that waits, and refuses tracked states: test_private_step": ["private_step", "PrivateState", "flush"],
    "holds no tensor: build_index and search_index are here": ["Index"],
    "puts rows back, bit for bit: test_rewind and test_delta": [
        "Logged", "logged", "rewind", "Delta", "delta", "apply_delta",
    ],
    "of codes, whose derivatives are none or straight through: test_quantized and test_fake_quantized": [
        "quantize", "dequantize", "QuantizedTables", "fake_quantize", "FakeQuantizedTables",
    ],
    "of a mesh: tests/dist holds each against its definition, under every transform and on ranks": [
        "ShardedTables", "gather_state", "psum_invariant", "pvary", "ragged_all_to_all", "reshard", "shard",
        "shard_tables", "sync_replicas", "towers", "Tower", "tower_placements",
        "unshard",
    ],
    "bag_filter, which is here, by a mask of ids": ["drop_ids"],
    "of ids, which have no derivative": [
        "vocabulary", "Vocabulary", "vocabulary_items", "vocabulary_of", "find", "admit", "expire", "Turnover",
        "VocabularyConfig",
    ],
    "puts drawn or moved rows into tables: test_vocabulary_rows": ["renew", "grow"],
    "tables with the ids that have their rows: test_dynamic": ["dynamic_tables", "DynamicTables", "admission"],
    "moves rows between memory and stores, and refuses tracked states: laws/cached": [
        "table_store", "TableStore", "CacheConfig", "cached_tables", "cached_step",
    ],
    "takes ranges of ids, as lookup_sequence, which is here": ["sequence_ids"],
    "draws integers, truths, or numbers of a key: tests/laws/random": ["random"],
    "a folder, made of what is here": ["data", "interop", "kernels", "metrics", "models", "nn", "optim"],
}  # fmt: skip


def wrong(case: Case, found: dict) -> list[str]:
    may = lambda which: case.refused == "*" or which in case.refused
    return [f"{k}: {o}" for k, o in found.items() if o != RIGHT and not (o.startswith(RAISED) and may(k[0]))]


# Each derivative of these takes a loss and more. Their inputs take turns: every mode meets every second input.
LONG = ("per_example_grads", "hvp", "remat", "train_step")


def sweeps_of(number: int, case: Case) -> Iterator[tuple[Case, str, tuple[str, ...]]]:
    """Yield (case, input, modes). The numbers of a rule, whose case follows that of its tensors under one name, and
    `scan` meet every second mode, in turn. Where no input may raise, second derivatives are those by all inputs at
    once, mixed ones included: they are wrong if a mode loses one of any input."""
    is_again = case.name in {c.name for c in CASES[:number]} or case.name == "scan"
    all_modes = tuple(MODES)[number % 2 :: 2] if is_again else tuple(MODES)
    is_apart = bool(case.refused) or len(case.inputs) == 1
    own = tuple(m for m in all_modes if is_apart or m in FIRST)
    for i, which in enumerate(case.inputs):
        yield case, which, own[i % 2 :: 2] if case.name in LONG else own
    if not is_apart:
        f, inputs = at_once(case.f, case.inputs)
        smooth = at_once(case.smooth, case.inputs)[0] if case.smooth else None
        yield case._replace(f=f, inputs=inputs, smooth=smooth), "x", tuple(m for m in all_modes if m in SECOND)


@pytest.mark.parametrize(("number", "case"), [*enumerate(CASES)], ids=[f"{i}-{c.name}" for i, c in enumerate(CASES)])
def test_right_or_raises(number, case):
    """In every mode, the derivative by every float input agrees with central differences. Where a case allows an error,
    the call may raise."""
    for one, which, modes in sweeps_of(number, case):
        assert not wrong(one, sweep(one, modes, [which]))


@pytest.mark.parametrize("outside", ["torch.enable_grad", "torch.func.grad", "torch.func.jvp", "forward_ad.dual_level"])
@pytest.mark.parametrize("implementation", ["cpp", "fbgemm"])
def test_no_operator_passes_a_derivative_by(implementation, outside):
    """`torch.ops.funcrec_*`, called directly with a tracked tensor, raises before the operator runs, whatever tracks
    the tensor."""
    if implementation == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
    library.load(implementation)
    operator = library.operator(implementation, "gather_rows")
    table = draw("a table", (5, 3)).float()
    calls = {
        "torch.enable_grad": lambda: operator(table.clone().requires_grad_(), ROWS),
        "torch.func.grad": lambda: torch.func.grad(lambda x: operator(table * x, ROWS).sum())(torch.ones(())),
        "torch.func.jvp": lambda: torch.func.jvp(
            lambda x: operator(table * x, ROWS), (torch.ones(()),), (torch.ones(()),)
        ),
        "forward_ad.dual_level": lambda: dual_call(operator, table),
    }
    if operator is None:
        pytest.fail(f"{implementation} has no gather_rows")
    with pytest.raises(TypeError, match="has no derivative here"):
        calls[outside]()


def dual_call(operator, table):
    with forward_ad.dual_level():
        return operator(forward_ad.make_dual(table, table), ROWS)


def test_every_name_is_swept():
    """Every public name of funcrec and funcrec.optim is either in the sweep or in the list of exceptions, not in
    both."""
    public = lambda module, prefix="": {
        prefix + n for n, x in vars(module).items() if not n.startswith("_") and not isinstance(x, types.ModuleType)
    }
    names = public(fr) | public(fr.optim, "optim.")
    elsewhere = [n for group in NOT_HERE.values() for n in group]
    assert not names - COVERED - set(elsewhere)
    assert not COVERED & set(elsewhere) - {"optim"}
    assert len(elsewhere) == len(set(elsewhere))


if __name__ == "__main__":
    total: Counter = Counter()
    for case in CASES:
        found = sweep(case)
        total += count(found)
        print(
            f"{case.name:40} {len(case.inputs)} inputs × {len(MODES)} modes: {dict(count(found))}",
            *wrong(case, found),
            sep="\n  ",
        )
    print(f"{sum(total.values())} triples: {dict(total)}")
