"""The main job's DeepFM on gloo ranks, under every placement, equals one process.

The process adds the gradients of the same local batches.

The main job gives the model with its dropout, the loss, both optimizers, the plans and the split of a batch over ranks.
"""

import functools

import pytest
import torch

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.data import Column, CtrData
from funcrec.examples import _ranks
from funcrec.models._ml1m import ML1M_FIELDS, ML1M_GENRES
from funcrec.testing import assert_trees_close

STEPS, BATCH, LR = 4, 128, 0.005
MODEL = fr.models.ml1m("deepfm")
KINDS = ("table_wise", "row_wise", "column_wise", "replicated")


def ratings():
    """Return the first rows of the train part of MovieLens-1M."""
    try:
        split = fr.data.ctr_dataset(fr.data.movielens_1m())
    except OSError as error:
        pytest.skip(f"MovieLens-1M cannot be fetched: {error}")
    rows = split.train[: STEPS * BATCH]
    return replace(split.data, user=split.data.user[rows], item=split.data.item[rows], label=split.data.label[rows])


def generated():
    """Return rows in the form of MovieLens-1M whose users and items repeat."""
    g = torch.Generator().manual_seed(0)
    draw = lambda n, size: (torch.rand(size, generator=g).pow(3) * (n - 1)).int() + 1
    sizes, columns, start = ML1M_FIELDS, [Column("genre", "genre", ML1M_GENRES, 0)], 0
    for name, n in sizes.items():
        columns.append(Column(name, "fields", n, start))
        start += n
    user, item = sizes["user_id"], sizes["item_id"]
    ids = {
        c.name: draw(c.vocabulary, item if c.name in ("item_id", "release_year") else user).long() + c.offset
        for c in columns[1:]
    }
    return CtrData(
        user=draw(user, STEPS * BATCH), item=draw(item, STEPS * BATCH),
        label=(torch.rand(STEPS * BATCH, generator=g) < 0.7).float(),
        user_columns={k: x for k, x in ids.items() if x.shape[0] == user},
        item_columns={k: x for k, x in ids.items() if x.shape[0] == item},
        genre=draw(ML1M_GENRES, (item, 6)).long(), genre_length=draw(7, item).long(), columns=tuple(columns),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(request):
    """Return (data, a function from (optimizer, number of ranks) to the training of one process)."""
    data = request.param()
    return data, functools.cache(functools.partial(alone, data))


def optimizers(name):
    dense = torch.optim.Adam if name == "adam" else torch.optim.SGD
    return {"sparse": getattr(fr.optim, name)(lr=LR), "dense": fr.optim.dense(dense, lr=LR)}


def alone(data, name, ranks):
    """Return (tables, slots, dense) of one process that adds the gradients of the ranks' batches. The dropout of a
    batch is that of its rank."""
    loss_fn, (sparse, dense), key = fr.models.loss(MODEL), optimizers(name).values(), fr.key(2)
    params = MODEL.init(fr.key(1))
    slots, opt = sparse.init(params.tables), dense.init(params.dense)
    for step in range(STEPS):
        total = None
        for r, rows in enumerate(torch.arange(step * BATCH, (step + 1) * BATCH).chunk(ranks)):
            own = fr.fold_in(fr.fold_in(key, step), r)
            mine = lambda p, batch, own=own: loss_fn(p, batch, key=own)[0] / ranks
            _, grads = fr.value_and_grad(mine)(params, data.take(rows))
            total = grads if total is None else added(total, grads)
        tables, slots = sparse.update(total.tables, slots, params.tables, step)
        weights, opt = dense.update(total.dense, opt, params.dense, step)
        params = fr.Params(tables, weights)
    return params.tables, slots, params.dense


def added(a, b):
    return fr.Params(
        {n: a.tables[n] + g for n, g in b.tables.items()}, fr.core._tree.tree_map(torch.add, a.dense, b.dense)
    )


def together(data, name, axes, kind, exact):
    """Return the results of `alone` from `train_step` on this process's ranks."""
    mesh = fr.Mesh.distributed(**axes)
    options = {**optimizers(name), "mesh": mesh, "plan": fr.Plan.uniform(kind, MODEL.tables, mesh), "exact": exact}
    step = fr.train_step(MODEL, **options)
    state, rows = step.init(MODEL.init(fr.key(1)), fr.key(2)), _ranks.OwnRows(data, mesh)
    for i in range(STEPS):
        state, _ = step(state, rows.take(torch.arange(i * BATCH, (i + 1) * BATCH)))
    whole = fr.gather_state(state, mesh)
    return whole.tables, whole.slots, whole.dense


def assert_same(got, want, **tolerance):
    for name, a, b in zip(("tables", "slots", "dense"), got, want, strict=True):
        assert_trees_close({name: a}, {name: b}, **tolerance)


on = lambda *cases: pytest.mark.parametrize(("trained", "kind"), cases, indirect=["trained"])


@on(*((generated, kind) for kind in KINDS), (ratings, "row_wise"))
def test_two_ranks_change_no_bit_of_the_main_job(kind, trained, ranks):
    """Four steps of the main job on two ranks equal, bit for bit, one process that adds the same two batches. This
    holds for tables, slots and dense parameters."""
    data, want = trained
    for got in ranks(2).run(together, data, "adam", {"data": 2}, kind, True):
        assert_same(got, want("adam", 2))


@on((generated, "grid"))
def test_a_grid_changes_no_bit_of_the_main_job(trained, kind, ranks):
    """The main job also keeps every bit on 2 x 2 ranks, with every table sharded by rows and columns."""
    data, want = trained
    for got in ranks(4).run(together, data, "adam", {"data": 2, "model": 2}, kind, True):
        assert_same(got, want("adam", 4))


@on((generated, "row_wise"))
def test_sums_at_the_owners_change_the_main_job_by_rounding(trained, kind, ranks):
    """Without exact=True, row-wise training by SGD agrees within 1e-6. (Adam is not compared. Adam divides a gradient
    by the gradient's size, so that a gradient of pure rounding gives a full step.)"""
    data, want = trained
    assert_same(ranks(2).run(together, data, "sgd", {"data": 2}, kind, False)[0], want("sgd", 2), rtol=1e-6, atol=1e-6)
