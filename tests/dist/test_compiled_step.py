"""A compiled sharded step has static exchanges, as few as possible. The step reads nothing on the host."""

import re

import pytest
import torch
from programs import training

import funcrec as fr

BAGS, ROOM, WORLD = 2, 32, 2
# the dense parameters and the loss
WEIGHTS = 17 * 6 + 6 + 1
HOST_READS = (
    ".item(",
    ".tolist(",
    ".cpu(",
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "repeat_interleave",
)
# gloo also runs a gather as this collective
ALL_TO_ALL = "all_to_all_single"
# ids with lengths, sums, cotangents of the sums, dense gradients with the loss
LEAST = [ALL_TO_ALL] * 4


def plan_of(kind):
    return training.plan_of(kind, {"x": WORLD})


def lowered(name, plan, codec=None):
    """Return (a lowered donating step, the step's arguments)."""
    mesh = fr.Mesh.distributed(x=WORLD)
    step = fr.train_step(training.loss_fn, **training.optimizers(name), mesh=mesh, plan=plan, codec=codec)
    whole = training.batch(0, BAGS * WORLD)
    mine = fr.shard(whole, fr.P("x"), mesh=mesh)
    arguments = step.init(training.params()), fr.Batch(mine.ids.unpad().pad_to(ROOM), mine.label)
    return fr.jit(step, donate=("state",)).lower(*arguments), arguments


def staged(name, plan, codec=None, is_compiled=True):
    """Return the (collectives, splits where they exist, whether every shape is static, generated code) of a step. If
    the step is not compiled, the code is that of its graph."""
    from programs.generated_code import generated_code

    step, arguments = lowered(name, plan, codec)
    codes = generated_code(lambda: step.compile()(*arguments))[1] if is_compiled else [f"{step.graph.graph}"]
    nodes = [n for n in step.graph.graph.nodes if n.op == "call_function"]
    splits = [s for n in nodes if ALL_TO_ALL in str(n.target) for s in n.args[1:3]]
    values = [
        v for n in nodes for v in torch.utils._pytree.tree_leaves(n.meta.get("val")) if isinstance(v, torch.Tensor)
    ]
    is_static = bool(values) and all(type(size) is int for v in values for size in v.shape)
    return step.exchanges, splits, is_static, "\n".join(codes)


# slots, columns and ids of a rank's lookups: two features of a, one of b and of c
SENT = {
    # rank 0 has a and c, and rank 1 has b
    "table_wise": (3 + 1, 3 * 4 + 5, 2 * ROOM),
    "row_wise": (4, 3 * 4 + 5, 2 * ROOM),
    # rank 0 has two columns of b, and rank 1 has three
    "column_wise": (4 + 1, 2 + 2 + 2 + 2 + 3, 2 * 2 * ROOM),
}


@pytest.mark.parametrize("kind", SENT)
def test_a_compiled_step_exchanges_once_for_each_thing(kind, ranks):
    """A step makes four exchanges with static splits, the same on all ranks. Its code, for rows, and its graph, for
    other placements, read nothing on the host. A rank sends the bytes of four things: ids and lengths, the sums of
    bags, the cotangents of the sums, and the dense gradients."""
    found = ranks(WORLD).run(staged, "adam", plan_of(kind), None, kind == "row_wise", deadline_s=300)
    for collectives, splits, is_static, code in found:
        assert [c.kind for c in collectives] == LEAST
        assert len(splits) == 2 * len(LEAST)
        assert all(type(n) is int for own in splits for n in own)
        assert is_static
        assert len(re.findall(r"all_to_all_single\.default\]?\(", code)) == len(LEAST)
        assert not [word for word in HOST_READS if word in code]
    assert found[0][0] == found[1][0]
    slots, columns, room = SENT[kind]
    per_id, per_float = 4, 4
    assert [c.sent_bytes for c in found[0][0]] == [
        (room + slots * BAGS) * per_id, BAGS * columns * per_float, BAGS * columns * per_float,
        WEIGHTS * per_float,
    ]  # fmt: skip


def test_copies_are_told_of_everything_at_once(ranks):
    """A small step with all tables replicated makes one exchange. The exchange has ids and bounds, cotangents, dense
    gradients and the loss."""
    plan = plan_of("replicated")
    # two features of each key
    ids, floats = 2 * ROOM + 4 * BAGS + 1, BAGS * 17 + WEIGHTS
    for collectives, splits, is_static, code in ranks(WORLD).run(staged, "adam", plan, None, False, deadline_s=300):
        assert [(c.kind, c.dtype, c.sent_bytes) for c in collectives] == [
            (ALL_TO_ALL, torch.float32, 4 * (ids + floats))
        ]
        assert all(type(n) is int for own in splits for n in own)
        assert is_static
        assert not [word for word in HOST_READS if word in code]


def test_a_coded_step_sends_fewer_bytes(ranks):
    """In bfloat16, the sums of bags take half the bytes. In int8, their cotangents take one byte each and four bytes
    for each slot. All other parts are the same."""
    codec = fr.Codec(forward="bfloat16", backward="int8")
    columns, slots = 3 * 4 + 5, 4
    for collectives, _, _, code in ranks(WORLD).run(staged, "adam", plan_of("row_wise"), codec, False):
        assert [c.kind for c in collectives] == LEAST
        assert [c.sent_bytes for c in collectives[1:3]] == [BAGS * columns * 2, BAGS * (columns + 4 * slots)]
        assert [c.dtype for c in collectives] == [torch.int32, torch.int8, torch.int8, torch.float32]
        assert not [word for word in HOST_READS if word in code]


def test_columns_in_place_cost_whole_cotangents(ranks):
    """An optimizer that needs whole rows' gradients adds no exchange. The cotangents of the sums contain all columns of
    their tables."""
    # rank 0 has two columns of b in one bank, and rank 1 has three in another
    whole = 2 * 4 + 2 * 5 + 4
    for collectives, _, _, code in ranks(WORLD).run(staged, "partial", plan_of("column_wise"), None, False):
        assert [c.kind for c in collectives] == LEAST
        assert collectives[2].sent_bytes == BAGS * whole * 4
        assert not [word for word in HOST_READS if word in code]


def test_rows_cut_by_columns_travel_at_once(ranks):
    """An optimizer that needs whole rows, here for its weight decay, adds two gathers for any number of column-wise
    tables. One gather has row numbers, the other all floats."""
    plan = plan_of("column_wise")
    for collectives, _, _, code in ranks(WORLD).run(staged, "rowwise_adagrad", plan, None, False):
        kinds = [c.kind for c in collectives]
        assert kinds == [*LEAST, ALL_TO_ALL, ALL_TO_ALL]
        assert not [word for word in HOST_READS if word in code]
