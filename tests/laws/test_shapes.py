"""Calls have the shapes of their docstrings and annotations. In one call, one letter means one size."""

import re

import pytest
from programs.doc_calls import doc_of, has_tensors, names_of, public, record
from programs.doc_shapes import DTYPES, Shape, Statement, shapes_in, statements_of, violations

import funcrec as fr

# one group of tests makes the calls once
pytestmark = pytest.mark.xdist_group("shapes")

# Functions of plain tensors without shapes in their docstrings, and the reason.
SAID_ELSEWHERE = {
    **dict.fromkeys(
        ("save", "load", "shard", "unshard", "save_safetensors", "load_safetensors"), "any tree of tensors"
    ),
    **dict.fromkeys(("Layer.init", "Layer.init_stats", "Layer.apply", "Layer.train_apply"), "by what makes the layer"),
    **dict.fromkeys(("HstuLayer.init", "HstuLayer.train_apply", "HstuLayer.keep"), "by what makes the layer"),
    **dict.fromkeys(
        ("Model.init", "TwoTower.init", "HstuRanker.init", "models.merge_stats"), "each model's parameters"
    ),
    "member": "any tree of stacked tensors",
    **dict.fromkeys(("TrainStep.init", "TrainStep.update"), "fields of a TrainState; metrics by train_step"),
    "eval_shape": "what the function returns",
    "dry_run": "a step's own parameters and batch",
    "debug_print": "any tensors",
    **dict.fromkeys(("while_loop", "fori_loop"), "the forms of `init`"),
    "vocabulary_items": "a list of as many places as rows, and two numbers",
    "Metric.init": "each metric's own sums",
    **dict.fromkeys(("fit", "Fitted"), "by the functions that they run"),
    "KeyedTensor.__getitem__": "the columns of a key, or bags of every key",
    "RowGrads.floats": "of all terms, of any shapes",
    "ShardedTables.__getitem__": "by the field `banks`",
    "QuantizedTables.__getitem__": "by the field `tables`",
    "FakeQuantizedTables.__getitem__": "by the fields",
    "DynamicTables.__getitem__": "by the field `tables`",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("shapes"))
        return record(folder)


def test_calls_have_the_shapes_that_docstrings_say(said):
    """The shapes and dtypes in docstrings and annotations hold in every public call and in the examples."""
    wrong = {n: found for n, s in said.items() if (found := {v for c in s.calls for v in violations(s.statements, c)})}
    assert wrong == {}, (
        f"calls of tests/programs/public_calls*.py contradict the docstrings of {sorted(wrong)}: {wrong}"
    )
    assert sum(len(s.statements) for s in said.values()) > 150


def test_no_statement_holds_whatever_a_call_has(said):
    """Each statement becomes false in some call if it gets one dimension more, or another dtype. Each statement is
    therefore really checked."""
    more = lambda shape: Shape(shape.dtypes, (*shape.dims, "7919"))
    other = lambda shape: Shape("f" if "b" in shape.dtypes else "bool", shape.dims) if shape.dtypes else more(shape)
    for name, s in said.items():
        for i, (subject, shapes) in enumerate(s.statements):
            for change in (more, other):
                false = Statement(subject, tuple(map(change, shapes)))
                wrong = [*s.statements[:i], false, *s.statements[i + 1 :]]
                assert any(any(violations(wrong, call)) for call in s.calls), (
                    f"no call of {name} has the tensor of {s.statements[i]}: {false} would hold, too. Add a call that "
                    "has it to tests/programs/public_calls*.py, or to the docstring's example"
                )


def test_functions_of_tensors_say_their_shapes(said):
    """Every public function or method that takes or returns a tensor states the shape of that tensor. Value classes
    state the shapes of their fields."""
    silent = {n for n, s in said.items() if has_tensors(s) and not s.statements and ": " not in n}
    new, gone = sorted(silent - set(SAID_ELSEWHERE)), sorted(set(SAID_ELSEWHERE) - silent)
    assert not new, f"{new} take or return tensors: write `x: f[B, D]` in Args and `-> f[B]` in the first paragraph"
    assert not gone, f"{gone} are not called, or state shapes now: strike them from SAID_ELSEWHERE in this file"
    # the calls include functions that other functions return
    for name, x in public():
        row = f"{name} has no call: add a row for it to tests/programs/public_calls_models.py"
        assert "Slots: " not in doc_of(x) or f"{name}: slots" in said, row
        assert not (name.startswith("nn.") and "] -> f[" in doc_of(x)) or {name, f"{name}: apply"} & set(said), row
    values = (
        fr.JaggedTensor,
        fr.KeyedJaggedTensor,
        fr.KeyedTensor,
        fr.RowGrads,
        fr.Batch,
        fr.TrainState,
        fr.ShardedTables,
    )
    assert all(said[x.__name__].statements for x in values)


WRONG = {
    "lookup": ("[B, ΣD]", "[F, ΣD]"),
    "lookup_transpose": ("f[B, ΣD]", "f[B, F]"),
    "global_norm": ("f[]", "f[T]"),
    "split": ("i64[num]", "i64[num + 1]"),
    "hash_rows": ("-> i[...]", "-> i[N, ...]"),
    "JaggedTensor": ("[B + 1]", "[B]"),
    "KeyedJaggedTensor": ("[F * B + 1]", "[B + 1]"),
    "regroup": ("[B, W]", "[W, B]"),
    "all_gather": ("or [n · K, ...]", "or [K, ...]"),
    "nn.dot_interaction": ("(F - 1)", "(F + 1)"),
    "nn.factorization_machine": ("f[B]", "f[D]"),
    "metrics.exact_auc": ("labels: [B]", "labels: [B, 1]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_docstring_is_seen(name, said):
    """A docstring with one letter of a shape wrong fails in the calls of its function."""
    x = dict(public())[name]
    right = doc_of(x)
    assert WRONG[name][0] in right
    statements = statements_of(right.replace(*WRONG[name]), names_of(x))
    assert any(any(violations(statements, call)) for call in said[name].calls)


def test_every_shape_in_a_docstring_is_read():
    """The tests parse everything that begins like a shape, with a dtype and a bracket."""
    for name, x in public():
        doc = doc_of(x).split("Example:")[0]
        begun = [m.start() for m in re.finditer(rf"(?<![\w\])|])(?:{'|'.join(DTYPES)})(?:\|\w+)*\[", doc)]
        unread = [doc[i : i + 30] for i in sorted(set(begun) - {start for start, _, _ in shapes_in(doc)})]
        assert not unread, f"the docstring of {name} has what begins like a shape and is none: {unread}"


def test_what_is_no_shape_is_not_read_as_one():
    """Lists of numbers, indexing, intervals and types in brackets are not parsed as shapes."""
    assert shapes_in("[[1, 2], []], x[r], [0, 1], `offsets[B]`, dict[str, Tensor], [0, n)") == []
    assert [str(s) for *_, s in shapes_in("f[B, ΣD] and i32|i64[F * B + 1] or [B, L, ...], f[]")] == [
        "f[B, ΣD]", "i32|i64[F * B + 1]", "[B, L, ...]", "f[]"
    ]  # fmt: skip
