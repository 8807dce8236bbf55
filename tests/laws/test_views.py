"""Views with gaps have the answers of contiguous tensors, or raise in words.

Integers of other widths than those of ids raise in words.
"""

import contextlib
import io
import itertools
import warnings

import pytest
import torch
from programs.public_calls import public_calls

import funcrec as fr
from funcrec.core import map_tensors, tree_leaves
from funcrec.testing import assert_trees_close

READ = [fr.FeatureConfig("sum", "t", column="a"), fr.FeatureConfig("best", "t", "max", column="a")]
IDS = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], [0]]})
LISTED = [fr.FeatureConfig("a", "t", "none")]
OWN = {
    "interop.to_nested": "a nested tensor's ragged size is a symbol of its own",
    ".build_index": "an index has an object of FAISS, which equals itself alone",
    "metrics.novelty": "a record of functions",
    "testing.law": "a function",
    "interop.module_apply": "a batch norm of equal numbers, which multiplies their rounding by 300",
}
# A view has the numbers of its copy, so a product of a library that rounds by strides may differ in its last bits.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def with_gaps(x):
    """The same numbers, every second one of a larger tensor along each dimension."""
    if type(x) is not torch.Tensor or not x.dim() or x.is_meta or x.layout != torch.strided:
        return x
    whole = torch.full([2 * n for n in x.shape], True if x.dtype == torch.bool else 77, dtype=x.dtype)
    view = whole[tuple(slice(0, 2 * n, 2) for n in x.shape)]
    return view.copy_(x)


def test_views_have_the_answers_of_their_copies(tmp_path, monkeypatch):
    """Each public call with a view with gaps in place of every tensor returns what it returns for contiguous tensors,
    or names the table that is such a view."""
    monkeypatch.chdir(tmp_path)
    tried, said, wrong = 0, 0, {}
    for call in public_calls(tmp_path):
        views = map_tensors(with_gaps, call.good)
        if call.name in OWN or all(x is y for x, y in zip(tree_leaves(views), tree_leaves(call.good), strict=True)):
            continue
        tried += 1
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = call.fn(**call.good)
            try:
                assert_trees_close(call.fn(**views), want, **CLOSE)
            except AssertionError as error:
                wrong[call.name] = str(error)
            except Exception as error:
                said += 1
                if "is a view with gaps" not in str(error):
                    wrong[call.name] = f"{type(error).__name__}: {error}"
    assert wrong == {}, "\n".join(f"{k}: {v}" for k, v in wrong.items())
    assert tried > 200 and said < 40


TABLE = torch.arange(24.0).view(6, 4)
VIEWS = {"rows": TABLE[::2], "columns": TABLE[:3, ::2], "first columns": TABLE[:3, :2], "transposed": TABLE[:4, :3].t()}
READS = {
    "lookup": lambda t: fr.lookup({"t": t}, IDS, READ[:1]), "max": lambda t: fr.lookup({"t": t}, IDS, READ[1:]),
    "lookup_each": lambda t: fr.lookup_each({"t": t}, IDS, READ[:1]),
    "lookup_sequence": lambda t: fr.lookup_sequence({"t": t}, IDS, LISTED),
    "grad": torch.func.grad(lambda t: fr.lookup({"t": t}, IDS, READ[:1]).values.sum()),
    "eval_shape": lambda t: fr.eval_shape(lambda t: fr.lookup({"t": t}, IDS, READ[:1]), t),
    "jit": lambda t: fr.jit(lambda t: fr.lookup({"t": t}, IDS, READ[:1]))(t),
}  # fmt: skip


@pytest.mark.parametrize(("view", "read"), list(itertools.product(VIEWS, READS)))
def test_a_table_with_gaps_is_named(view, read):
    """A lookup in a table that is a view with gaps raises, and names the table and its strides. It copies no table."""
    with pytest.raises(ValueError, match=r"`tables\['t'\]` is a view with gaps.\n  got   f32\[\d, \d\] with strides"):
        READS[read](VIEWS[view])


def test_a_part_of_a_table_is_read():
    """A table's first rows are contiguous, and lookups read them. So do all members of a vmap over any dimension."""
    copied = lambda t: fr.lookup({"t": t.contiguous()}, IDS, READ[:1]).values
    assert_trees_close(READS["lookup"](TABLE[:3]).values, copied(TABLE[:3]), rtol=0, atol=0)
    stack = torch.arange(24.0).view(3, 4, 2)
    members = torch.func.vmap(lambda t: READS["lookup"](t).values, in_dims=1)(stack)
    assert_trees_close(members, torch.stack([copied(stack[:, i]) for i in range(4)]), rtol=0, atol=0)


OTHER = [torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool]
KEPT = fr.admit(fr.vocabulary(128), torch.tensor([5, 9]))[0]
KEYED = lambda values, offsets: fr.KeyedJaggedTensor(values, offsets, None, None, ("a",))
DOORS = {
    "from_lengths": lambda x: fr.KeyedJaggedTensor.from_lengths(["a"], torch.arange(3), x),
    "offsets": lambda x: fr.lookup({"t": TABLE}, KEYED(torch.tensor([1]), x), READ),
    "lookup": lambda x: fr.lookup({"t": TABLE}, KEYED(x, torch.tensor([0, 2])), READ),
    "lookup_sequence": lambda x: fr.lookup_sequence({"t": TABLE}, KEYED(x, torch.tensor([0, 2])), LISTED),
    "hash_rows": lambda x: fr.hash_rows(x, fr.modulo(), 10), "find": lambda x: fr.find(KEPT, x),
    "admit": lambda x: fr.admit(KEPT, KEYED(x, torch.tensor([0, 2]))),
    "dedup_bags": lambda x: fr.dedup_bags(KEYED(x, torch.tensor([0, 2]))),
    "drop_ids": lambda x: fr.drop_ids(KEYED(x, torch.tensor([0, 2])), 1),
    "top_k": lambda x: fr.top_k(TABLE[:1], TABLE, 2, exclude=fr.JaggedTensor(x, torch.tensor([0, 2]))),
    "from_entries": lambda x: fr.RowGrads.from_entries(x, TABLE[:2], num_embeddings=6),
}  # fmt: skip


@pytest.mark.parametrize(("door", "dtype"), list(itertools.product(DOORS, OTHER)))
def test_ids_of_other_widths_are_refused(door, dtype):
    """Ids, offsets and lengths are i32 or i64, as in TorchRec. Others raise, and the error says what they are. The
    error of narrower integers says how to widen them."""
    with pytest.raises(TypeError) as error:
        DOORS[door](torch.tensor([1, 2]).to(dtype))
    names = {torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool"}
    said = str(error.value)
    assert f"got   {names.get(dtype, str(dtype).removeprefix('torch.'))}[2]" in said
    assert dtype == torch.bool or ".long()" in said or "offsets=torch.tensor" in said
