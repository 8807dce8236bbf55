"""Private gradients on a mesh: each rank clips its examples, and every row gets its noise once, whatever the plan."""

import functools

import pytest
import torch
from programs import private_ranks as private

import funcrec as fr
from funcrec.testing import assert_trees_close

CASES = [
    ("row_wise", {"x": 2}, "sgd", {}),
    ("table_wise", {"x": 4}, "adam", {"chunk_size": 1}),
    ("column_wise", {"x": 2}, "rowwise_adagrad", {}),
    ("column_wise", {"x": 2}, "adam", {"rows": "touched"}),
    ("replicated", {"x": 2}, "sgd", {"batch_size": 5}),
    ("replicated", {"x": 2}, "rowwise_adagrad", {"rows": "touched"}),
    ("grid", {"x": 2, "y": 2}, "rowwise_adagrad", {"chunk_size": 2}),
    ("table_row_wise", {"x": 2, "y": 2}, "adam", {"rows": "touched"}),
]


@pytest.mark.parametrize(("kind", "axes", "sparse", "how"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_a_mesh_trains_as_one_process(kind, axes, sparse, how):
    """States and losses agree with those of one process under every placement. Dropout follows the example's number in
    the whole batch."""
    mesh = fr.Mesh.emulated(**axes)
    plan = fr.Plan.uniform(kind, private.SHAPES, mesh)
    state, losses = private.trained(private.step(sparse, mesh=mesh, plan=plan, **how))
    want, wanted = private.trained(private.step(sparse, **how))
    got = fr.gather_state(state, mesh)
    assert_trees_close((got.tables, got.dense, losses), (want.tables, want.dense, wanted), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "replicated"])
def test_noise_has_the_bits_of_one_process(kind):
    """Rows that no batch reads have the same bits under every plan, in f32, and differ from other rows' noise."""
    mesh, start = fr.Mesh.emulated(x=2), private.params(torch.float32)
    plan = fr.Plan.uniform(kind, private.SHAPES, mesh)
    loss_fn = lambda p, b: private.loss_fn(p, b, key=fr.key(0)).float()
    state, _ = private.trained(private.step(loss_fn=loss_fn, mesh=mesh, plan=plan), start=start, most=1)
    want, _ = private.trained(private.step(loss_fn=loss_fn), start=start, most=1)
    tables = fr.gather_tables(state.tables, mesh)
    assert fr.tree.equal(tables, want.tables)
    noise = (tables["item"] - start.tables["item"]).flatten()
    assert len(noise.unique()) == noise.numel()


def test_real_ranks_train_as_one_process(ranks):
    """Two processes of gloo give the state of one process."""
    want, wanted = private.trained(private.step())
    for got, losses in ranks(2).run(private.on_ranks, {"x": 2}, "row_wise", deadline_s=120):
        assert_trees_close((got.tables, got.dense, losses), (want.tables, want.dense, wanted), rtol=1e-9, atol=1e-11)


def test_a_staged_step_and_a_clipped_one(interpreted):
    """A staged, donated step on a mesh is the eager step; `max_norm` of the step scales the noisy gradient."""
    mesh = fr.Mesh.emulated(x=2)
    plan = fr.Plan.uniform("row_wise", private.SHAPES, mesh)
    how = {"mesh": mesh, "plan": plan, "more": {"max_norm": 0.1}}
    eager = private.step(**how)
    b = private.batch(0)
    want, _ = eager(eager.init(private.params()), b)
    alone = private.step(more={"max_norm": 0.1})
    alone, _ = alone(alone.init(private.params()), b)
    assert_trees_close(fr.gather_state(want, mesh).tables, alone.tables, rtol=1e-9, atol=1e-11)
    state, _ = fr.jit(eager, donate=("state",))(fr.copy(eager.init(private.params())), b)
    assert_trees_close(state.tables.banks, want.tables.banks, rtol=1e-9, atol=1e-11)


REFUSED = {
    "max_ids": ({"max_ids": None}, {}, "`max_ids` of private_grads is missing"),
    "capacity": ({}, {"capacity": 8}, "do not go with `capacity`"),
    "codec": ({}, {"codec": fr.Codec("bfloat16", "bfloat16")}, "do not go with `codec`"),
    "dense_axes": ({}, {"dense_axes": ("x",)}, "do not go with `dense_axes`"),
    "batch_axes": ({}, {"batch_axes": ()}, "do not go with `batch_axes`"),
    "micro_batches": ({}, {"micro_batches": 2}, "differentiates the whole batch"),
}


@pytest.mark.parametrize(("how", "more", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_on_a_mesh_is_refused(how, more, said):
    """Arguments with which an example's gradient would be cut, rounded or counted twice are refused."""
    mesh = fr.Mesh.emulated(x=2)
    plan = fr.Plan.uniform("row_wise", private.SHAPES, mesh)
    with pytest.raises(TypeError, match=said):
        private.step(mesh=mesh, plan=plan, more=more, **how)


def test_other_gradients_and_tables_are_refused():
    """A transform around private_grads, replicas, dynamic tables, and a codec of the state are refused."""
    mesh = fr.Mesh.emulated(x=2)
    plan = fr.Plan.uniform("row_wise", private.SHAPES, mesh)
    own = functools.partial(fr.private_grads, **private.HOW)

    def around(loss_fn):
        fn = own(loss_fn)
        return functools.wraps(fn)(lambda *args, **kwargs: fn(*args, **kwargs))

    for grad in (around, fr.value_and_grad):
        with pytest.raises(TypeError, match="`grad` is for one process"):
            fr.train_step(lambda p, b: p, grad=grad, mesh=mesh, plan=plan)
    copies = fr.Plan({n: fr.replicated() for n in private.SHAPES}, replicas="x")
    with pytest.raises(TypeError, match="do not go with `replicas`"):
        private.step(mesh=mesh, plan=copies)
    step = private.step(mesh=mesh, plan=plan)
    known = fr.VocabularyConfig(fr.vocabulary(128), [fr.TableConfig("item", 128, 4)], private.READ[:1])
    tables = fr.dynamic_tables(fr.init(fr.key(0), known.tables), {"items": known}, key=fr.key(0))
    dynamic = private.step(mesh=mesh, plan=fr.Plan({"item": fr.row_wise("x")}))
    with pytest.raises(TypeError, match="cannot get private gradients"):
        dynamic(dynamic.init(fr.Params(tables, {})), private.batch(0))
    state = fr.reshard(private.step().init(private.params()), plan, mesh=mesh, sparse=fr.optim.sgd(0.1),
                       codec=fr.Codec("bfloat16", "bfloat16"))  # fmt: skip
    with pytest.raises(TypeError, match="`codec` rounds gradients"):
        step(state, private.batch(0))
