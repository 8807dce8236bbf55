"""For all inputs that their types allow, the C++ kernels stay inside their tensors and give the reference's result.

`make sanitize` makes many more of these calls, with sanitizers built into the kernels.
"""

import inspect
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from funcrec.kernels import cpp, library
from funcrec.kernels.cpp import _native, _planned
from programs import hostile
from programs.guarded import Guards, outputs

FEW = {
    "admit_columns": 45,
    "settle_columns": 45,
    "admit_ids": 45,
    "generated_update": 3,
    "fused_update": 40,
    "windowed_update": 20,
    "stacked_update": 40,
    "empty_update": 20,
    "pooled_lookup": 45,
    "quantized_lookup": 45,
    "stacked_lookup": 45,
    "invariant_bmm": 40,
    "invariant_sum": 40,
    "jagged_attention": 25,
    "jagged_attention_transpose": 20,
}


@pytest.mark.parametrize("operation", hostile.OPERATIONS)
def test_any_offsets_and_ids(operation, monkeypatch):
    """Hostile offsets, ids and sizes give the reference's result, with the same bits on one and two threads. The
    tensors lie between inaccessible pages. Rules that no kernel implements are compiled."""
    guards, run, compiled = Guards(), hostile.on_threads, Mock(wraps=cpp.generated_update_)
    monkeypatch.setattr(cpp, "generated_update_", compiled)
    for seed in range(FEW.get(operation, 50)):
        guards.reset(at_end=seed % 3 > 0)

        def guarded_run(number, call):
            with outputs(guards):
                return run(number, call)

        hostile.check(operation, seed, guards.place, on_threads=guarded_run)
    assert (compiled.call_count > 0) == (operation == "generated_update")


# Names of the C++ implementation that are no operation of their own.
OTHER_NAMES = {
    "planned_fused_update_": "fused_update, in place, of the usual tensors",
    "planned_lookup": "quantized_lookup without weights",
    "planned_pooled_lookup": "pooled_lookup of the usual tensors",
    "planned_top_k": "top_k without rows to leave out",
    "fused_update_": "fused_update, in place",
    "generated_update_": "generated_update, in place",
    "scatter_rows_": "scatter_rows, in place",
    "scatter_block_": "scatter_block, in place",
    "settle_ids_": "settle_ids, in place",
    "settle_columns_": "settle_columns, in place",
    "draw_rows_": "draw_rows, in place",
    "generate": "returns the C++ text of a rule",
    "decompositions": "returns a table of operators",
}


def test_every_operation_has_hostile_calls():
    """Each function of the C++ implementation and each of its operators has hostile calls, or a reason for none."""
    functions = {n for n, x in vars(cpp).items() if inspect.isfunction(x) and not n.startswith("_")}
    assert functions - set(OTHER_NAMES) <= set(hostile.OPERATIONS)
    assert set(OTHER_NAMES) <= functions
    operators = {n for n in library.SCHEMAS if not n.endswith("_") and library.operator("cpp", n)}
    assert operators <= set(hostile.OPERATIONS)


def test_every_entry_point_is_called(monkeypatch):
    """The hostile calls run each compiled function that takes an array of numbers."""
    text = "".join(path.read_text() for path in (Path(hostile.__file__).parents[2] / "kernels/csrc").glob("*.cpp"))
    entries = {*re.findall(r"FUNCREC_ENTRY\((\w+)\)", text)}
    entries |= {*re.findall(r"FUNCREC_EXPORT int64_t funcrec_(\w+)\(const int64_t\* numbers\)", text)}
    called, entry, runner = set(), _native._entry, _planned._runner
    monkeypatch.setattr(_native, "_entry", lambda name: (called.add(name), entry(name))[1])
    monkeypatch.setattr(_planned, "_runner", lambda path, name: (called.add(name), runner(path, name))[1])
    for operation in set(hostile.OPERATIONS) - {"generated_update"}:
        for seed in range(3):
            hostile.check(operation, seed)
    assert len(entries) >= 18 and called == entries


def test_to_padded_does_not_read_foreign_memory():
    """Offsets that descend to the least integer are read as their running maximum. Memory around the buffer is never
    returned."""
    for dtype in (torch.int64, torch.int32, torch.float32):
        memory = torch.full((300,), 7).to(dtype)
        memory[100:105] = torch.arange(1, 6).to(dtype)
        for bad in (-(2**63), 2**63 - 1, -1, 2**40):
            out = cpp.to_padded(memory[100:105], torch.tensor([0, 5, bad]), 8, 0)
            assert out.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [0] * 8]


ROWS, OFFSETS, TABLE, FEATURE = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 2, 4]), torch.ones(3, 2), [0] * 7
LINE = [0, 0, 4, 4, 1, 0, 0]
e = lambda fn, *args, **kwargs: (fn, args, kwargs)
ROOM, NO_BIAS = torch.ones(4, 1, 2), [None] * 5 + [1.0, 1.0, True, True]
TIMED = [None, torch.ones(1, 3), ROWS[:3], ROWS, None, *NO_BIAS[5:]]
TAGS = torch.zeros(128, dtype=torch.uint8)
VOCABULARY, HOW = [TAGS, torch.zeros(128, 2, dtype=torch.int64), torch.tensor(0)], [0, 0, 0, 1 << 53, 0, 0]
GIVEN = [0, 3, 0, 0, 0, 0, 0, 4, 0, 0]  # one entry of four rows that are given
MISFITS = [
    (e(cpp.jagged_attention, ROOM, ROOM, ROOM[:3], OFFSETS, OFFSETS, *NO_BIAS), ValueError, "keys and values"),
    (e(cpp.jagged_attention, ROOM, ROOM, ROOM.double(), OFFSETS, OFFSETS, *NO_BIAS), ValueError, "keys and values"),
    (e(cpp.jagged_attention, *[ROOM.long()] * 3, OFFSETS, OFFSETS, *NO_BIAS), TypeError, "int64"),
    (e(cpp.jagged_attention, *[ROOM] * 3, OFFSETS, OFFSETS[:2], *NO_BIAS), ValueError, "key_offsets"),
    (e(cpp.jagged_attention, *[ROOM] * 3, OFFSETS[:0], OFFSETS[:0], *NO_BIAS), ValueError, "no boundary"),
    (e(cpp.jagged_attention, *[ROOM] * 3, OFFSETS, OFFSETS, TABLE, *NO_BIAS[1:]), ValueError, "heads"),
    (e(cpp.jagged_attention, *[ROOM] * 3, OFFSETS, OFFSETS, TABLE[:1, :0], *NO_BIAS[1:]), ValueError, "heads"),
    (e(cpp.jagged_attention, *[ROOM] * 3, OFFSETS, OFFSETS, *TIMED), ValueError, "times"),
    (e(cpp.jagged_attention, *[ROOM] * 3, OFFSETS, OFFSETS, *NO_BIAS[:4], ROWS, *NO_BIAS[5:]), ValueError, "targets"),
    (e(cpp.jagged_attention_transpose, *[ROOM] * 2, ROOM, *[ROOM] * 3, OFFSETS, OFFSETS, *NO_BIAS), ValueError, "logs"),
    (
        e(cpp.jagged_attention_transpose, ROOM[:3], ROOM, ROOM[..., 0], *[ROOM] * 3, OFFSETS, OFFSETS, *NO_BIAS),
        ValueError,
        "d_out",
    ),
    (e(cpp.pooled_lookup, [TABLE], [ROWS.float()], OFFSETS, None, FEATURE, 2), TypeError, "float32"),
    (e(cpp.pooled_lookup, [TABLE], [ROWS], OFFSETS.half(), None, FEATURE, 2), TypeError, "float16"),
    (e(cpp.pooled_lookup, [TABLE.long()], [ROWS], OFFSETS, None, FEATURE, 2), TypeError, "int64.*need.*float32"),
    (e(cpp.pooled_lookup, [TABLE], [ROWS], OFFSETS, None, [0, 0, 0, 0, 0, 1, 0], 2), ValueError, "weights"),
    (e(cpp.pooled_lookup, [TABLE], [ROWS], OFFSETS, torch.ones(3), [0, 0, 0, 0, 0, 1, 0], 2), ValueError, "4 ids"),
    (e(cpp.pooled_lookup, [TABLE], [ROWS], OFFSETS, None, [-1, *FEATURE[1:]], 2), ValueError, "feature 0"),
    (e(cpp.pooled_lookup, [TABLE], [ROWS], OFFSETS, None, [0, 1, 0, 0, 0, 0, 0], 2), ValueError, "feature 0"),
    (e(cpp.pooled_lookup, [TABLE], [ROWS], OFFSETS, None, [0, 0, -1, 0, 0, 0, 0], 2), ValueError, "feature 0"),
    (e(cpp.pooled_lookup, [TABLE], [ROWS], OFFSETS, None, [0, 0, 0, 0, 0, 0, 1], 2), ValueError, "without gaps"),
    (e(cpp.pooled_lookup, [TABLE], [ROWS], OFFSETS, None, FEATURE * 2, 2), ValueError, "without gaps"),
    (e(cpp.pooled_lookup, [TABLE], [ROWS], OFFSETS, None, FEATURE, 2, 2), ValueError, "blocks"),
    (
        e(cpp.pooled_lookup_weights, TABLE[:2, :1], [TABLE], [ROWS], OFFSETS, torch.ones(4), FEATURE),
        ValueError,
        "1 columns",
    ),
    (e(cpp.gather_rows, TABLE, ROWS.to(torch.int16)), TypeError, "int16"),
    (e(cpp.gather_rows, TABLE, ROWS.view(2, 2)), ValueError, "dimensions"),
    (e(cpp.gather_rows, TABLE, torch.zeros(33, dtype=torch.uint8)[1:].view(torch.uint8)), TypeError, "uint8"),
    (e(cpp.scatter_rows_, TABLE, ROWS, torch.tensor(4), torch.ones(3, 2)), ValueError, "new"),
    (e(cpp.scatter_rows_, TABLE, ROWS, torch.ones(2), torch.ones(4, 2)), ValueError, "count"),
    (e(cpp.take_ranges, ROWS, OFFSETS[:2], OFFSETS, 4), ValueError, "lengths"),
    (e(cpp.take_ranges_transpose, TABLE, OFFSETS[:2], OFFSETS, 4), ValueError, "lengths"),
    (e(cpp.to_padded, ROWS, OFFSETS.double(), 2, 0), TypeError, "float64"),
    (e(cpp.to_padded, ROWS, OFFSETS[:0], 2, 0), ValueError, "no boundary"),
    (e(cpp.from_padded, TABLE, OFFSETS, 4), ValueError, "offsets"),
    (e(cpp.bucketize, ROWS, OFFSETS, torch.ones(3), 2, 4), ValueError, "weights"),
    (e(cpp.owner_blocks, ROWS, OFFSETS, [0, 0, 4, 4, 9, 0, 0], [0], 2, 1, 4, True, False), ValueError, "fit"),
    (e(cpp.owner_blocks, ROWS, OFFSETS, [2**63 - 1, *LINE[1:]], [0], 2, 1, 4, True, False), ValueError, "fit"),
    (e(cpp.owner_blocks, ROWS, OFFSETS, LINE * 2, [0], 2, 1, 4, True, True), ValueError, "fit"),
    (e(cpp.initial_rows, ROWS[0], ROWS, 2, 3, 1.0, torch.float32), ValueError, "no such rows"),
    (e(cpp.initial_rows, ROWS, ROWS, 2, 1, 1.0, torch.float32), ValueError, "dimensions"),
    (e(cpp.draw_rows_, [TABLE], [], ROWS, ROWS, ROWS, ROWS, [0] * 10, []), ValueError, "scales"),
    (e(cpp.draw_rows_, [TABLE], [], ROWS, ROWS, ROWS, ROWS, [0] * 9 + [4], [1.0]), ValueError, "entry 0.*4 keys"),
    (e(cpp.draw_rows_, [TABLE], [], ROWS, ROWS, ROWS, ROWS, [1] + [0] * 9, [1.0]), ValueError, "fit each other"),
    (e(cpp.draw_rows_, [TABLE], [], ROWS, ROWS, ROWS, ROWS, [0] * 7 + [5, 0, 0], [1.0]), ValueError, "fit each other"),
    (e(cpp.draw_rows_, [TABLE], [TABLE[:3]], ROWS, ROWS, ROWS, ROWS, GIVEN, [1.0]), ValueError, "fit each other"),
    (e(cpp.find_columns, VOCABULARY[:2], ROWS, OFFSETS, [0, 0], [0, 0, 0, 9, 0]), ValueError, "fit each other"),
    (e(cpp.find_columns, VOCABULARY[:2], ROWS, OFFSETS, [0, 0], [1, 0, 0, 1, 0]), ValueError, "fit each other"),
    (e(cpp.find_columns, VOCABULARY[:2], ROWS, OFFSETS, [0], []), ValueError, "the numbers do not fit"),
    (e(cpp.find_columns, [TAGS[:64], VOCABULARY[1]], ROWS, OFFSETS, [0, 0], []), ValueError, "not a vocabulary"),
    (e(cpp.admit_columns, VOCABULARY, [], [ROWS], [OFFSETS], HOW, [0, 1, 0, 1, 0]), ValueError, "a column does not"),
    (e(cpp.admit_columns, VOCABULARY, [], [ROWS], [OFFSETS], HOW, [0, 0, 0, 9, 0]), ValueError, "fit each other"),
    (e(cpp.admit_columns, VOCABULARY, [], [ROWS], [OFFSETS], HOW, [0, 0, 0, 2, 0] * 2), ValueError, "fit each other"),
    (e(cpp.admit_columns, VOCABULARY, [], [ROWS], [], HOW, []), ValueError, "one for each buffer"),
    (e(cpp.admit_columns, VOCABULARY[:2], [], [ROWS], [OFFSETS], HOW, []), ValueError, "number of tensors"),
    (e(cpp.admit_columns, VOCABULARY, [], [ROWS], [OFFSETS], [3, *HOW[1:]], []), ValueError, "scores"),
    (e(cpp.settle_columns_, VOCABULARY, [ROWS], [OFFSETS], [ROWS] * 6, HOW, []), ValueError, "found"),
]


@pytest.mark.parametrize(("call", "kind", "said"), MISFITS, ids=[f"{c[0].__name__}-{s}" for c, _, s in MISFITS])
def test_what_does_not_fit_is_refused(call, kind, said):
    """Before a call of a kernel, tensors with a wrong dtype, shape or count raise an error in four parts."""
    fn, args, kwargs = call
    with pytest.raises(kind) as error:
        fn(*args, **kwargs)
    text = str(error.value)
    assert re.search(f"(?s){said}", text) and re.search(r"(?s)funcrec.kernels.*\n  got .*\n  need .*\n  try ", text)


def test_numbers_across_their_addresses_are_refused():
    """A view at an address that is no multiple of the element size is refused, because processors and compilers may
    rely on alignment."""
    memory = bytearray(65)
    across = torch.frombuffer(memory, dtype=torch.int64, offset=1, count=4)
    with pytest.raises(ValueError, match=r"(?s)an address is not aligned.*clone"):
        cpp.gather_rows(TABLE, across)
    assert cpp.gather_rows(TABLE, across.clone()).eq(1).all()


def update(**changed):
    """Return the arguments of an update of one table, with some arguments changed."""
    given = {
        "tables": [torch.ones(3, 2)], "slots": [], "d": [torch.ones(4, 2)], "rows": [ROWS], "offsets": [OFFSETS],
        "weights": [torch.ones(4)], "segments": [0, 0, 0, 0, 0, 0, 2, 0, 0, 0], "lr": torch.tensor(0.1),
        "step": torch.tensor(0),
        "key": None, "rule": "sgd", "hyper": [0.0],
    }  # fmt: skip
    return {**given, **changed}


SEGMENTS = [
    [1, 0, 0, 0, 0, 0, 2, 0, 0, 0], [0, 1, 0, 0, 0, 0, 2, 0, 0, 0], [0, 0, 1, 0, 0, 0, 2, 0, 0, 0],
    [0, 0, -1, 0, 0, 0, 2, 0, 0, 0],
    [0, 0, 2**63 - 1, 0, 0, 0, 2, 0, 0, 0], [0, 0, 0, 1, 0, 0, 2, 0, 0, 0], [0, 0, 0, 0, 1, 0, 2, 0, 0, 0],
    [0, 0, 0, 0, 0, 1, 2, 0, 0, 0],
    [0, 0, 0, 0, 0, 2**63 - 1, 2, 0, 0, 0], [0, 0, 0, 0, 0, -1, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0, 5, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, -1, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 2, -1, 0, 0], [0, 0, 0, 0, 0, 0, 2, 0, 0, 1], [0, 0, 0, 0, -1, 0, 5, 0, 0, 0],
]  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        *({"segments": s} for s in SEGMENTS),
        {"rows": [ROWS.float()]},
        {"offsets": [OFFSETS.half()]},
        {"offsets": [OFFSETS[:0]]},
        {"weights": [torch.ones(3)]},
        {"lr": torch.ones(0)},
        {"step": torch.ones(2)},
        {"key": torch.zeros(1)},
        {"key": torch.zeros(2, dtype=torch.int64)},
        {"tables": [torch.ones(3, 2, dtype=torch.int32)]},
        {"rule": "adagrad", "hyper": [0.0, 0.0], "slots": [torch.ones(3, 1)]},
        {"rule": "adagrad", "hyper": [0.0, 0.0], "slots": [torch.ones(3, 2, dtype=torch.float64)]},
    ],
    ids=str,
)
def test_an_update_that_does_not_fit_is_refused(changed):
    """Segments that point outside, and tensors of a wrong dtype or size, raise. No table is written."""
    given = update(**changed)
    before = [x.clone() for x in given["tables"]]
    with pytest.raises((TypeError, ValueError)):
        cpp.fused_update_(**given)
    assert all(map(torch.equal, given["tables"], before))
    cpp.fused_update_(**update())
