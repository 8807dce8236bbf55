"""The HSTU ranker: candidates one by one, in one sequence and by a kept history; padded torch; transforms."""

import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

import funcrec as fr
from funcrec.testing import assert_trees_close

TABLES = (fr.TableConfig("item", 50, 6), fr.TableConfig("category", 9, 3), fr.TableConfig("user", 7, 4))
SEQUENCE = functools.partial(fr.FeatureConfig, pooling="none", max_length=6)
SETTINGS = {
    "history": [SEQUENCE("item", table="item"), SEQUENCE("category", table="category")],
    "candidates": [SEQUENCE("next", table="item"), SEQUENCE("next_category", table="category")],
    "context": [fr.FeatureConfig("user", table="user")],
    "action": "action", "time": "time", "query_time": "now",
    "dim": 8, "qk_dim": 4, "linear_dim": 3, "hidden": 5, "head": 7, "num_positions": 4, "num_times": 8,
    "normalizer": 6.0,
}  # fmt: skip
LISTS = {
    "user": [[1], [2], [3]],
    "item": [[4, 5, 6], [], [7, 8, 9, 10, 11]],
    "category": [[1, 2, 3], [], [4, 5, 6, 7, 8]],
    "action": [[1, 2, 16], [], [4, 1, 8, 8, 3]],
    "time": [[0, 5, 60], [], [7, 7, 8, 100, 1000]],
    "next": [[12, 13], [14], [15, 16, 17]],
    "next_category": [[0, 1], [2], [3, 4, 5]],
    "now": [[100], [50], [2000]],
}
LABEL = torch.tensor([[1.0, 0.0, 9.0], [0.0, 9.0, 9.0], [1.0, 1.0, 0.0]])  # 9: no candidate


def make(dtype=torch.float64, **changes):
    """Return a model and parameters of which none is 0 or 1."""
    model = fr.models.hstu_ranker(TABLES, **{**SETTINGS, **changes})
    draw = lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel()), dtype=torch.float64)
    return model, fr.tree.map(lambda x: (x.double() + 0.2 * draw(x)).to(dtype), model.init(fr.key(0)))


def batch(lists=LISTS, garbage=5, label=LABEL):
    """Return a batch whose buffer ends in ids that mean nothing."""
    ids = fr.KeyedJaggedTensor.from_lists(lists, dtype=torch.int64)
    values = torch.cat([ids.values, torch.full((garbage,), 10**9)])
    return fr.Batch(fr.KeyedJaggedTensor(values, ids.offsets, keys=ids.keys), label)


def one_candidate(bag, place):
    """Return the lists of one bag with one candidate."""
    return {k: [x[bag][place : place + 1] if k.startswith("next") else x[bag]] for k, x in LISTS.items()}


@pytest.mark.parametrize("changes", [{}, {"concatenate": True}, {"num_layers": 3, "num_tasks": 2}])
def test_candidates_are_scored_alike_in_three_ways(changes):
    """One sequence, one sequence for each candidate, and a kept history give a candidate the same logits."""
    model, params = make(torch.float32, **changes)
    together = model.apply(params, batch())
    kept = model.encode_history(params, batch())
    torch.testing.assert_close(
        model.score(params, kept, batch()).unpad().values, together.unpad().values, rtol=0, atol=1e-5
    )
    alone = [
        model.apply(params, batch(one_candidate(b, c))).unpad().values
        for b, bag in enumerate(LISTS["next"]) for c in range(len(bag))
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(alone), together.unpad().values, rtol=0, atol=1e-5)


def test_a_kept_history_serves_other_candidates():
    """`score` reads only the candidates and the time of the request, also for another number of candidates and for
    empty bags."""
    model, params = make()
    kept = model.encode_history(params, batch({k: x for k, x in LISTS.items() if not k.startswith(("next", "now"))}))
    others = {"next": [[], [1, 2, 3, 4], [5]], "next_category": [[], [1, 2, 3, 4], [5]], "now": LISTS["now"]}
    got = model.score(params, kept, batch(others))
    want = model.apply(params, batch({**LISTS, **others}))
    assert got.lengths.tolist() == [0, 4, 1]
    torch.testing.assert_close(got.unpad().values, want.unpad().values)


@pytest.mark.parametrize("changes", [{}, {"time": None, "query_time": None, "context": [], "num_layers": 3}])
def test_a_kept_history_is_padded_and_read_again(changes):
    """A history that went through padded tensors scores candidates with the same bits. A user with more positions than
    fit raises."""
    model, params = make(**changes)
    kept = model.encode_history(params, batch())
    padded = kept.to_padded(7)
    assert padded["lengths"].tolist() == kept.layers[0].keys.lengths.tolist() and ("time" in padded) == (not changes)
    again = fr.models.History.from_padded(**padded)
    want = model.score(params, kept, batch()).unpad().values
    assert model.score(params, again, batch()).unpad().values.equal(want)
    with pytest.raises(ValueError, match="longer than `length`"):
        kept.to_padded(5 if not changes else 4)
    with pytest.raises(ValueError, match="lengths"):
        fr.models.History.from_padded(**{**padded, "lengths": padded["lengths"] + 5})


def test_a_compiled_history_that_does_not_fit_has_no_score(interpreted):
    """Under jit, scores by padded histories are those of the model. A user with more positions than fit, or with a
    length outside the keys, has scores of NaN."""
    model, params = make(num_layers=1)

    @fr.jit
    def through(params, ids, more):
        def padded(length, more):
            padded = kept.to_padded(length)
            history = fr.models.History.from_padded(**{**padded, "lengths": padded["lengths"] + more})
            return model.score(params, history, fr.Batch(ids))

        kept = model.encode_history(params, fr.Batch(ids))
        return padded(4, 0), padded(7, more)

    want = model.apply(params, batch()).unpad().values
    for more in ([0, 0, 9], [0, 0, -9]):
        for got in (x.unpad().values for x in through(params, batch().ids, torch.tensor(more))):
            assert got[3:].isnan().all()
            torch.testing.assert_close(got[:3], want[:3])
    assert through.num_compiled() == 1


def test_a_history_that_does_not_fit_is_not_kept():
    """Under jit, a user whose columns differ has length -1 and keys of NaN, also with no position; a later call that
    can read the length raises."""
    model, params = make(context=[], num_layers=1)
    keep = fr.jit(lambda params, ids: model.encode_history(params, fr.Batch(ids)).to_padded(6))
    padded = keep(params, batch({**LISTS, "action": [LISTS["action"][0], [1, 2], LISTS["action"][2]]}).ids)
    assert padded["lengths"].tolist() == [3, -1, 5] and padded["keys"][1].isnan().all()
    assert padded["keys"][::2].isfinite().all()
    with pytest.raises(ValueError, match="lengths"):
        fr.models.History.from_padded(**padded)


def test_later_positions_move_nothing_before():
    """The model is causal: a longer history has the same keys, values and outputs in its beginning."""
    model, params = make()
    cut = {k: [x[:2] for x in v] if k in ("item", "category", "action", "time") else v for k, v in LISTS.items()}
    whole, short = (model.encode_history(params, batch(x)) for x in (LISTS, cut))
    for a, b in zip(whole.layers, short.layers, strict=True):
        for bag in range(3):
            size = 1 + len(cut["item"][bag])
            begin, other = a.keys.offsets[bag], b.keys.offsets[bag]
            torch.testing.assert_close(a.values[begin : begin + size], b.values[other : other + size])
            torch.testing.assert_close(a.keys.values[begin : begin + size], b.keys.values[other : other + size])


# -- the padded model in plain torch ------------------------------------------------------------------------------


def padded_logits(params, num_tasks=1):
    """Return the logits of each bag's candidates, one bag after the other, from dense matrices and masks."""
    tables, dense = params.tables, params.dense
    linear = lambda p, x: F.linear(x, p["weight"], p.get("bias"))
    norm = lambda p, x: F.layer_norm(x, x.shape[-1:], p["weight"], p["bias"], 1e-5)

    def tower(p, x):
        x = linear(p[0], x)
        x = linear(p[2], x * norm(p[1], x).sigmoid())
        return norm(p[3], x) if len(p) == 4 else x

    found = []
    for b in range(3):
        rows = lambda item, category: torch.cat([tables["item"][item], tables["category"][category]], -1)
        history, candidates = (
            rows(LISTS[i][b], LISTS[c][b]) for i, c in (("item", "category"), ("next", "next_category"))
        )
        own = dense["action"]
        bits = torch.tensor([[a & w > 0 for w in (1, 2, 4, 8, 16)] for a in LISTS["action"][b]]).view(-1, 5, 1)
        action = tower(own["mlp"], (bits * own["bits"]).flatten(1))
        context = linear(dense["context"][0], tables["user"][LISTS["user"][b][0]])[None]
        of_candidates = tower(dense["content"], candidates) + tower(own["mlp"], own["unknown"])
        x = torch.cat([context, tower(dense["content"], history) + action, of_candidates])
        n, c = x.shape[0], candidates.shape[0]
        times = [*(LISTS["time"][b][:1] or [0]), *LISTS["time"][b], *[LISTS["now"][b][0]] * c]
        for layer in dense["hstu"]:
            x = padded_layer(layer, x, torch.tensor(times), n - c, linear, norm)
        item = tower(dense["item"], candidates)
        found.append(tower(dense["head"], norm(dense["norm"], x[n - c :]) * item))
    return torch.cat(found)


def padded_layer(p, x, times, first, linear, norm):
    """Return the layer's output at each position; candidates begin at `first`."""
    n = x.shape[0]
    u, v, q, k = F.silu(linear(p["project"], norm(p["norm"], x))).split([6, 6, 8, 8], 1)
    place = torch.arange(n)
    sees = torch.tensor([[j <= i and (j < first or j == i) for j in range(n)] for i in range(n)])
    place = place.clamp(max=first)  # every candidate has the next position
    far = (place[:, None] - place[None, :]).clamp(min=0, max=3)
    apart = (times[:, None] - times[None, :]).abs().double()
    bucket = (apart.clamp(min=1).log() / 0.301).floor().long().clamp(max=7)
    heads = []
    for h in range(2):
        s = q[:, 4 * h : 4 * h + 4] @ k[:, 4 * h : 4 * h + 4].T / 2
        s = s + p["position_bias"][h][far] + p["time_bias"][h][bucket]
        heads.append((F.silu(s) * sees / 6.0) @ v[:, 3 * h : 3 * h + 3])
    return x + linear(p["out"], u * norm(p["out_norm"], torch.cat(heads, 1)))


def test_jagged_is_padded_torch():
    """Logits and gradients are those of dense matrices with masks in plain torch, with garbage in our padding."""
    model, params = make()
    torch.testing.assert_close(model.apply(params, batch()).unpad().values, padded_logits(params))
    ours = lambda p: model.apply(p, batch()).unpad().values.sin().sum()
    found, want = grad(ours)(params), grad(lambda p: padded_logits(p).sin().sum())(params)
    assert_trees_close((dict(found.tables), found.dense), (dict(want.tables), want.dense), rtol=1e-6, atol=1e-9)
    assert all(bool(x.isfinite().all()) for x in fr.tree.leaves(found))


# -- training, transforms -------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_candidates():
    """The loss is the mean cross entropy of real candidates; a weight of an example is that of its candidates."""
    model, params = make(input_dropout=0.0, dropout=0.0)
    loss_fn = fr.models.ranker_loss(model)
    value, aux = loss_fn(params, batch(), key=fr.key(0))
    z, y = padded_logits(params)[:, 0], torch.tensor([1.0, 0, 0, 1, 1, 0], dtype=torch.float64)
    each = F.binary_cross_entropy_with_logits(z, y, reduction="none")
    torch.testing.assert_close(value, each.mean())
    torch.testing.assert_close(aux["logits"][aux["weight"] > 0][:, 0], z)
    weighted = fr.Batch(batch().ids, LABEL, weight=torch.tensor([2.0, 0.0, 1.0]))
    w = torch.tensor([2.0, 2, 0, 1, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(loss_fn(params, weighted, key=fr.key(0))[0], (w * each).sum() / w.sum())
    with pytest.raises(ValueError, match="does not match the candidates"):
        loss_fn(params, fr.Batch(batch().ids, None), key=fr.key(0))
    with pytest.raises(ValueError, match=r"label"):
        loss_fn(params, fr.Batch(batch().ids, LABEL[:, :2]), key=fr.key(0))


def test_several_tasks_have_their_labels():
    """With T tasks a label f[B, C, T] gives each task its column."""
    model, params = make(num_tasks=2, input_dropout=0.0, dropout=0.0)
    label = torch.stack([LABEL, 1 - LABEL], 2)
    both, aux = fr.models.ranker_loss(model, weights=(1.0, 0.5))(params, batch(label=label), key=fr.key(0))
    z, real = aux["logits"], aux["weight"] > 0
    y = torch.tensor([1.0, 0, 0, 1, 1, 0], dtype=torch.float64)
    want = [F.binary_cross_entropy_with_logits(z[real][:, t], x) for t, x in enumerate((y, 1 - y))]
    torch.testing.assert_close(both, want[0] + 0.5 * want[1])


def test_gradients_of_tables_are_dense_autograd():
    """`value_and_grad` of the loss, with dropout, has torch's gradients; a second derivative agrees too."""
    model, params = make()
    loss_fn = fr.models.ranker_loss(model)
    (value, _), grads = fr.value_and_grad(loss_fn, has_aux=True)(params, batch(), key=fr.key(1))
    plain = lambda tables, dense: loss_fn(fr.Params(tables, dense), batch(), key=fr.key(1))[0]
    d_tables, d_dense = grad(plain, argnums=(0, 1))(params.tables, params.dense)
    assert_trees_close(grads.dense, d_dense, rtol=1e-6, atol=1e-9)
    assert_trees_close({k: g.to_dense() for k, g in grads.tables.items()}, d_tables, rtol=1e-6, atol=1e-9)
    direction = fr.tree.map(torch.ones_like, params.dense)
    along = lambda e: grad(lambda d: plain(params.tables, d))(
        fr.tree.map(lambda x, y: x + e * y, params.dense, direction)
    )
    _, product = jvp(along, (torch.zeros((), dtype=torch.float64),), (torch.ones((), dtype=torch.float64),))
    near = fr.tree.map(lambda a, b: (a - b) / 2e-5, along(1e-5), along(-1e-5))
    assert_trees_close(product, near, rtol=1e-4, atol=1e-6)
    assert value.isfinite()


def test_ensembles_and_compiled_steps():
    """vmap over members is a loop. A compiled, donated training step has the numbers of the plain one."""
    model, params = make(torch.float32)
    other = fr.tree.map(lambda x: 0.5 * x, params)
    stacked = fr.tree.map(lambda *x: torch.stack(x), params, other)
    logits = lambda p: model.apply(p, batch()).values
    torch.testing.assert_close(
        vmap(logits)(stacked), torch.stack([logits(params), logits(other)]), rtol=1e-4, atol=1e-5
    )
    model, params = make(torch.float32, num_layers=1, context=[], candidates=[SEQUENCE("next", table="item")],
                         history=[SEQUENCE("item", table="item")])  # fmt: skip
    step = fr.train_step(
        fr.models.ranker_loss(model), sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1),
        has_aux=True, merge=fr.models.merge_stats,
    )  # fmt: skip
    plain, fast = step.init(params, fr.key(0)), fr.copy(step.init(params, fr.key(0)))
    compiled = fr.jit(step, donate=("state",))
    for _ in range(2):
        plain, _ = step(plain, batch())
        fast, _ = compiled(fast, batch())
    assert_trees_close(fr.tree.leaves(fast), fr.tree.leaves(plain), rtol=1e-4, atol=1e-5)


def test_a_ranker_pickles():
    """A pickled ranker, and a pickled layer, compute the bits of the original."""
    model, params = make()
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded.apply(params, batch()).values, model.apply(params, batch()).values)
    layer = fr.nn.hstu_layer(4, normalizer=3.0)
    x, own = fr.JaggedTensor.from_lists([torch.ones(2, 4)]), layer.init(fr.key(0))
    assert torch.equal(pickle.loads(pickle.dumps(layer)).apply(own, x).values, layer.apply(own, x).values)


def test_empty_batches():
    """Without users, candidates or histories, there are no logits, or logits from the context alone."""
    model, params = make()
    none = {k: [] for k in LISTS}
    assert model.apply(params, batch(none, label=None)).unpad().values.shape == (0, 1)
    kept = fr.models.History.from_padded(**model.encode_history(params, batch(none)).to_padded(3))
    assert model.score(params, kept, batch(none, label=None)).unpad().values.shape == (0, 1)
    bare = {k: [[], [], []] if k not in ("user", "now") else x for k, x in LISTS.items()}
    assert model.apply(params, batch(bare, garbage=0)).unpad().values.shape == (0, 1)
    cold = {**bare, "next": LISTS["next"], "next_category": LISTS["next_category"]}
    assert model.apply(params, batch(cold)).unpad().values.isfinite().all()
    assert not model.query(fr.Params(params.tables, params.dense), batch(LISTS))[0].isnan().any()


def test_columns_that_differ_are_refused(interpreted):
    """Columns of one sequence with other bags raise. Where they cannot be read, the logits of such bags are NaN, and
    the logits of other bags do not change."""
    model, params = make(num_layers=1)
    wrong = {**LISTS, "action": [[1], [], [4, 1, 8, 8, 3, 3, 3]]}
    with pytest.raises(ValueError, match="differ in their bags"):
        model.apply(params, batch(wrong))
    with pytest.raises(ValueError, match="lacks column 'now'"):
        model.apply(params, batch({k: x for k, x in LISTS.items() if k != "now"}))
    fast = fr.jit(model.apply)
    of_one_form = lambda lists: batch(lists, garbage=60 - sum(len(bag) for x in lists.values() for bag in x))
    want = model.apply(params, batch()).unpad().values
    torch.testing.assert_close(fast(params, of_one_form(LISTS)).unpad().values, want)
    for column, bag, bags in [("action", 0, [1]), ("time", 1, [7] * 9), ("category", 0, []), ("next_category", 1, [])]:
        changed = {**LISTS, column: [bags if b == bag else x for b, x in enumerate(LISTS[column])]}
        got = fast(params, of_one_form(changed))
        is_wrong = got.bag_ids()[: len(want)] == bag
        assert got.unpad().values[is_wrong].isnan().all()
        torch.testing.assert_close(got.unpad().values[~is_wrong], want[~is_wrong])
    assert fast.num_compiled() == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"history": []}, "`history` is empty"),
        ({"candidates": SETTINGS["candidates"][:1]}, "`candidates` do not match"),
        ({"context": [SEQUENCE("before", table="item")]}, "is a sequence"),
        ({"query_time": None}, "come together"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes, told):
    """For features that are not a sequence, or have no partner, the error names them."""
    with pytest.raises(ValueError, match=told):
        make(**changes)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_labels_may_be_bools_or_integers(dtype):
    """Labels of bools or integers give the loss of the same labels as floats. Labels for fewer candidates than a bag
    has raise, and so do columns of a history with several `max_length`."""
    model, params = make()
    loss_fn, label = fr.models.ranker_loss(model), LABEL == 1
    got, want = (loss_fn(params, batch(label=x), key=fr.key(1))[0] for x in (label.to(dtype), label.double()))
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="is too narrow"):
        loss_fn(params, batch(label=label[:, :1]), key=fr.key(1))
    with pytest.raises(ValueError, match="several `max_length`"):
        make(history=[SETTINGS["history"][0], SEQUENCE("category", table="category", max_length=3)])
