"""Models of sequences: jagged histories against the same model in plain torch, padded to the longest."""

import contextlib
import pickle

import pytest
import torch
import torch.nn.functional as F
from programs.as_staged import staged_only
from torch import nn

import funcrec as fr
from funcrec.testing import assert_trees_close

R, D, L = 11, 8, 5
HISTORY = fr.FeatureConfig("history", table="item", pooling="none")
TABLES = (fr.TableConfig("item", R, D, dtype=torch.float64, initializer=fr.normal(0.3)),)
BAGS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10, 0, 1], [2, 2]]
MODELS = {
    "sasrec": fr.models.sasrec(TABLES, HISTORY, heads=2, max_length=L, dropout=0.0),
    "gru4rec": fr.models.gru4rec(TABLES, HISTORY, num_hidden=6, layers=2, max_length=L),
    "hstu": fr.models.hstu(TABLES, HISTORY, heads=2, qk_dim=3, max_length=L, dropout=0.0),
}
SHALLOW = {  # compiled in a third of the time
    "sasrec": fr.models.sasrec(TABLES, HISTORY, blocks=1, heads=2, max_length=L, dropout=0.0),
    "gru4rec": fr.models.gru4rec(TABLES, HISTORY, num_hidden=6, max_length=L),
    "hstu": fr.models.hstu(TABLES, HISTORY, layers=1, heads=2, qk_dim=3, max_length=L, dropout=0.0),
}
EACH = pytest.mark.parametrize("name", MODELS)


def params_of(name, seed=0, models=MODELS):
    params = models[name].init(fr.key(seed))
    shaken = fr.tree.map(lambda x: x.double() + 0.1 * torch.sin(torch.arange(x.numel())).view(x.shape), params.dense)
    return fr.Params(params.tables, shaken)


def batch_of(bags, garbage=0):
    ids = fr.KeyedJaggedTensor.from_lists({"history": bags})
    values = torch.cat([ids.values, torch.tensor([-5, 10**9, R] * garbage, dtype=torch.int64)])
    return fr.Batch(fr.KeyedJaggedTensor(values, ids.offsets, keys=("history",)))


class PaddedSASRec(nn.Module):
    """SASRec of the source: right padding, torch's own attention, poisoned padding."""

    def __init__(self, params):
        super().__init__()
        self.p, self.item = params.dense, params.tables["item"]

    def forward(self, padded, lengths):
        inside = (torch.arange(padded.shape[1]) < lengths[:, None])[..., None]
        x = self.item[padded.clamp(0)] * D**0.5 + self.p["position"]["weight"][: padded.shape[1]]
        for b in self.p["blocks"]:
            x = torch.where(inside, x, 1e3)  # padding is after all that a query sees
            attention = nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64)
            own = {"in_proj_weight": b["in"]["weight"], "in_proj_bias": b["in"]["bias"]}
            own |= {"out_proj.weight": b["out"]["weight"], "out_proj.bias": b["out"]["bias"]}
            norm = lambda x, n: F.layer_norm(x, (D,), n["weight"], n["bias"], 1e-8)
            q, mask = norm(x, b["attention_norm"]), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            of = lambda *args, **how: torch.func.functional_call(attention, own, args, how)  # noqa: B023
            f = norm(q + of(q, x, x, attn_mask=mask, need_weights=False)[0], b["norm"])
            inner = F.linear(f, b["first"]["weight"], b["first"]["bias"]).relu()
            x = f + F.linear(inner, b["second"]["weight"], b["second"]["bias"])
        return F.layer_norm(x, (D,), self.p["norm"]["weight"], self.p["norm"]["bias"], 1e-8)


class PaddedGRU4Rec(nn.Module):
    """GRU4Rec by torch.nn.GRU on padded histories."""

    def __init__(self, params):
        super().__init__()
        self.p, self.item = params.dense, params.tables["item"]

    def forward(self, padded, lengths):
        x = self.item[padded.clamp(0)]
        for own in self.p["gru"]:
            layer = nn.GRU(x.shape[-1], 6, batch_first=True, dtype=torch.float64)
            x = torch.func.functional_call(layer, {f"{name}_l0": w for name, w in own.items()}, (x,))[0]
        return F.linear(x, self.p["out"]["weight"])


class PaddedHSTU(nn.Module):
    """HSTU of the source: right padding, a mask of L x L weights without softmax, poisoned padding."""

    def __init__(self, params):
        super().__init__()
        self.p, self.item = params.dense, params.tables["item"]

    def forward(self, padded, lengths):
        n = padded.shape[1]
        inside = (torch.arange(n) < lengths[:, None])[..., None]
        x = self.item[padded.clamp(0)] * D**0.5 + self.p["position"]["weight"][:n]
        norm = lambda x, own, eps=1e-5: F.layer_norm(x, x.shape[-1:], own["weight"], own["bias"], eps)
        apart = torch.arange(n)[:, None] - torch.arange(n)
        for own in self.p["layers"]:
            x = torch.where(inside, x, 1e3)  # padding is after all that a query sees
            mixed = F.silu(F.linear(norm(x, own["norm"]), own["project"]["weight"], own["project"]["bias"]))
            u, v, q, k = (y.unflatten(2, (2, -1)) for y in mixed.split([8, 8, 6, 6], 2))
            scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / 3**0.5 + own["position_bias"][:, apart.clamp(0)]
            seen = torch.einsum("bhnm,bmhd->bnhd", F.silu(scores) * (apart >= 0) / L, v)
            x = x + F.linear(u.flatten(2) * norm(seen.flatten(2), own["out_norm"]), own["out"]["weight"])
        return norm(x, self.p["norm"], 1e-6)


PADDED = {"sasrec": PaddedSASRec, "gru4rec": PaddedGRU4Rec, "hstu": PaddedHSTU}


def padded_of(bags, length=L):
    cut = [b[-length:] for b in bags]
    lengths = torch.tensor([len(b) for b in cut])
    return torch.tensor([b + [0] * (max(lengths) - len(b)) for b in cut]), lengths


@EACH
def test_jagged_is_padded(name):
    """The vectors of all positions equal those of the padded model, whatever the padding of either holds."""
    model, params = MODELS[name], params_of(name)
    want = PADDED[name](params)(*padded_of(BAGS))
    for garbage in (0, 3):
        got = model.hidden(params, batch_of(BAGS, garbage).ids["history"])
        for b, n in enumerate(padded_of(BAGS)[1].tolist()):
            torch.testing.assert_close(got[b].unpad().values, want[b, :n])
        query = model.query(params, batch_of(BAGS, garbage))
        last = torch.stack([want[b, n - 1] if n else 0 * want[b, 0] for b, n in enumerate(padded_of(BAGS)[1].tolist())])
        torch.testing.assert_close(query, last)


@EACH
def test_a_history_stands_alone(name):
    """A history has the same vectors in any batch. Items before its latest max_length do not matter."""
    model, params = MODELS[name], params_of(name)
    together = model.query(params, batch_of(BAGS))
    apart = torch.cat([model.query(params, batch_of([b])) for b in BAGS])
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(together, model.query(params, batch_of([b[-L:] for b in BAGS])))
    assert model.query(params, batch_of([[], []])).eq(0).all() and model.query(params, batch_of([])).shape == (0, D)


@EACH
def test_it_is_causal(name):
    """The vector of a position does not depend on later items, and its derivative by their vectors is 0."""
    model, params = MODELS[name], params_of(name)
    at = lambda bag: model.hidden(params, batch_of([bag]).ids["history"]).values
    torch.testing.assert_close(at([1, 2, 3, 4])[:2], at([1, 2, 9, 0])[:2])
    of_table = lambda t: model.hidden(fr.Params({"item": t}, params.dense), batch_of([[1, 2, 3]]).ids["history"]).values
    jacobian = torch.func.jacrev(of_table)(params.tables["item"])[:2]
    assert jacobian[:, :, 3].eq(0).all() and jacobian[:, :, 1].ne(0).any()


@EACH
def test_second_derivatives(name):
    """The product of the Hessian of a score with a vector is the same forward over reverse and reverse over reverse."""
    model, params = MODELS[name], params_of(name)
    score = lambda dense: model.query(fr.Params(params.tables, dense), batch_of(BAGS, 1)).sin().sum()
    along = fr.tree.map(lambda x: torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape), params.dense)
    gradient = torch.func.grad(score)
    product = torch.func.jvp(gradient, (params.dense,), (along,))[1]
    assert_trees_close(product, torch.func.vjp(gradient, params.dense)[1](along)[0], rtol=1e-8, atol=1e-10)
    assert max(float(x.abs().max()) for x in fr.tree.leaves(product)) > 1e-6


def padded_loss(name, params, bags):
    """Return the mean cross entropy of all next items, by the padded model and whole logits."""
    kept = [b[-L - 1 :] for b in bags if len(b) > 1]
    h = PADDED[name](params)(*padded_of([b[:-1] for b in kept]))
    logits = torch.cat([x[: len(b) - 1] for x, b in zip(h, kept, strict=True)]) @ params.tables["item"].T
    return F.cross_entropy(logits, torch.tensor([i for b in kept for i in b[1:]]))


@EACH
def test_loss_and_gradients_of_the_tied_table(name):
    """Loss and gradients equal those of the padded model, also for the table, which is both input and output."""
    model, params = MODELS[name], params_of(name)
    loss_fn = fr.models.next_item_loss(model, chunk=4)
    loss, grads = fr.value_and_grad(loss_fn)(params, batch_of(BAGS, 2), key=fr.key(1))
    want = lambda table, dense: padded_loss(name, fr.Params({"item": table}, dense), BAGS)
    torch.testing.assert_close(loss, want(params.tables["item"], params.dense))
    d_table, d_dense = torch.func.grad(want, argnums=(0, 1))(params.tables["item"], params.dense)
    torch.testing.assert_close(grads.tables["item"].to_dense(), d_table)
    assert_trees_close(grads.dense, d_dense, rtol=1e-6, atol=1e-8)


@EACH
def test_it_pickles(name):
    """A pickled model makes the same parameters and gives the same queries."""
    model, batch = MODELS[name], batch_of(BAGS)
    again = pickle.loads(pickle.dumps(model))
    assert_trees_close(again.init(fr.key(3)), model.init(fr.key(3)), rtol=0, atol=0)
    assert again.query(params_of(name), batch).equal(model.query(params_of(name), batch))


@EACH
def test_histories_are_weighted(name):
    """A history of weight 0 does not count, and one of weight 2 counts twice. Without any next item the loss is 0."""
    loss_fn, params = fr.models.next_item_loss(MODELS[name]), params_of(name)
    at = lambda bags, w=None: loss_fn(params, weighed(bags, w), key=fr.key(1))
    w = torch.tensor([2.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(at(BAGS, w), at([BAGS[0], BAGS[0], BAGS[4]]))
    assert at([[1], []]) == 0


def weighed(bags, weight):
    return fr.Batch(batch_of(bags).ids, weight=weight)


LOSSES = {
    "gru4rec": {},
    "hstu": {"loss": "sampled_softmax", "num_negatives": 4, "temperature": 0.5},
    "sasrec": {"loss": "gbce", "num_negatives": 4},
}


@EACH
@pytest.mark.parametrize("how", LOSSES.values(), ids=["softmax", "sampled", "gbce"])
def test_a_step(name, how):
    """Steps lower the loss. A step under vmap over two members equals the steps of both."""
    model = MODELS[name]
    step = fr.train_step(fr.models.next_item_loss(model, **how), sparse=fr.optim.adam(0.05))
    states = [step.init(params_of(name, seed), fr.key(seed)) for seed in (0, 1)]
    batch = batch_of(BAGS, 1)
    news, firsts = zip(*(step(state, batch) for state in states), strict=True)
    state = news[0]
    for _ in range(6):
        state, last = step(state, batch)
    assert last["loss"] < firsts[0]["loss"]
    stacked = fr.tree.map(lambda *xs: torch.stack(xs), *states)
    both = torch.func.vmap(step, in_dims=(0, None))(stacked, batch)[0]
    assert_trees_close(both, fr.tree.map(lambda *xs: torch.stack(xs), *news), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name, how", LOSSES.items(), ids=LOSSES)
def test_a_compiled_step(name, how):
    """A donated step, staged for each model and each loss and compiled for SASRec, equals an eager step."""
    step = fr.train_step(fr.models.next_item_loss(SHALLOW[name], **how), sparse=fr.optim.adam(0.05))
    state, batch = step.init(params_of(name, models=SHALLOW), fr.key(0)), batch_of(BAGS, 1)
    fast, own = fr.jit(step, donate=("state",)), fr.copy(state)
    with contextlib.nullcontext() if name == "sasrec" else staged_only():
        for _ in range(3):
            (state, _), (own, _) = step(state, batch), fast(own, batch)
            assert_trees_close(own, state, rtol=1e-6, atol=1e-8)


PLACEMENTS = {
    "rows": fr.row_wise("data"),
    "columns": fr.column_wise("data"),
    "whole": fr.table_wise("data", rank=1),
    "replicas": fr.replicated(),
}


@EACH
def test_on_ranks(name):
    """On two ranks, with the item table cut by rows, a step equals that of one process on the whole batch."""
    model, params = MODELS[name], params_of(name)
    bags, weight = [*BAGS, [3, 4]], torch.ones(6, dtype=torch.float64)
    loss_fn, sparse = fr.models.next_item_loss(model), fr.optim.sgd(0.1)
    dense = fr.optim.dense(torch.optim.SGD, lr=0.1)
    plain = fr.train_step(loss_fn, sparse=sparse, dense=dense)
    want, metrics = plain(plain.init(params), weighed(bags, weight))
    mesh, plan = fr.Mesh.emulated(data=2), fr.Plan({"item": fr.row_wise("data")})
    step = fr.train_step(loss_fn, sparse=sparse, dense=dense, mesh=mesh, plan=plan)
    got, on_ranks = step(step.init(params), weighed(bags, weight))
    torch.testing.assert_close(on_ranks["loss"], metrics["loss"])
    torch.testing.assert_close(fr.gather_tables(got.tables, mesh)["item"], want.tables["item"])
    assert_trees_close(got.dense, want.dense, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_on_ranks_with_another_table(place):
    """On two ranks all placements of the item table, after another table of its dim, give the step of one process."""
    tables = (fr.TableConfig("user", 7, D, dtype=torch.float64), *TABLES)
    model = fr.models.gru4rec(tables, HISTORY, num_hidden=6, max_length=L)
    how = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    loss_fn, batch = fr.models.next_item_loss(model), batch_of([*BAGS, [3, 4]])
    params = fr.tree.to(model.init(fr.key(0)), dtype=torch.float64)
    plain, mesh = fr.train_step(loss_fn, **how), fr.Mesh.emulated(data=2)
    want, metrics = plain(plain.init(params), batch)
    plan = fr.Plan({"user": fr.replicated() if place == "replicas" else fr.row_wise("data"), "item": PLACEMENTS[place]})
    step = fr.train_step(loss_fn, **how, mesh=mesh, plan=plan)
    got, on_ranks = step(step.init(params), batch)
    torch.testing.assert_close(on_ranks["loss"], metrics["loss"])
    torch.testing.assert_close(fr.gather_tables(got.tables, mesh)["item"], want.tables["item"])


@EACH
def test_shared_histories_are_those_of_examples(name):
    """Histories that `dedup_bags` stores once give the queries and the weighted loss of histories stored for each
    example."""
    model, params, key = MODELS[name], params_of(name), fr.key(1)
    bags, weight = [[1, 2, 3], [4, 5], [1, 2, 3], [], [4, 5]], torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0]).double()
    each = weighed(bags, weight)
    shared = fr.core.replace(each, ids=fr.dedup_bags(each.ids))
    assert shared.ids.num_bags < 5
    torch.testing.assert_close(model.query(params, shared), model.query(params, each))
    loss_fn = fr.models.next_item_loss(model)
    torch.testing.assert_close(loss_fn(params, shared, key=key), loss_fn(params, each, key=key))


@EACH
def test_it_learns_a_cycle_and_is_judged(name):
    """Trained on items that follow each other in a cycle, the model ranks the next one first by evaluate_retrieval."""
    model = MODELS[name]
    bags = [[(start + i) % R for i in range(6)] for start in range(R)]
    step = fr.train_step(fr.models.next_item_loss(model), sparse=fr.optim.adam(0.02))
    state, batch = step.init(params_of(name)), batch_of(bags)
    for _ in range(60):
        state, _ = step(state, batch)
    ids = {"history": [b[:4] for b in bags], "next": [[b[4]] for b in bags]}
    batches = [fr.Batch(fr.KeyedJaggedTensor.from_lists(ids))]
    params = state.params
    found = fr.evaluate_retrieval(model.query, params, batches, model.items(params), "next", seen="history", k=1)
    assert found["hit_rate@1"] > 0.9


def test_bad_input():
    """A pooled or hashed history, a dim that the heads do not divide and losses without negatives raise."""
    pooled, hashed = fr.FeatureConfig("h", table="item"), fr.FeatureConfig("h", "item", "none", hash=fr.modulo())
    weighted = fr.FeatureConfig("h", "item", "none", weighted=True)
    cut = fr.FeatureConfig("h", "item", "none", max_length=3)
    wrong = {
        pooled: "is pooled",
        hashed: "does not name rows",
        weighted: "does not name rows",
        cut: "cuts off the latest",
    }
    for feature, part in wrong.items():
        with pytest.raises(ValueError, match=part):
            fr.models.sasrec(TABLES, feature)
    with pytest.raises(ValueError, match="`heads` does not divide"):
        fr.models.sasrec(TABLES, HISTORY, heads=3)
    with pytest.raises(ValueError, match="`num_negatives` does not match"):
        fr.models.next_item_loss(MODELS["sasrec"], loss="gbce")
    with pytest.raises(TypeError, match="key"):
        fr.models.next_item_loss(MODELS["sasrec"])(params_of("sasrec"), batch_of(BAGS))


@pytest.mark.parametrize("how", [{}, {"loss": "sampled_softmax", "num_negatives": 4}], ids=["all", "drawn"])
@EACH
def test_items_of_a_vocabulary_are_refused(name, how):
    """A table that follows a vocabulary has no row for each item: losses over all or drawn items refuse it, and so does
    the list of all items. Queries read it."""
    items, table = fr.vocabulary(128), fr.TableConfig("item", 128, D, dtype=torch.float64, initializer=fr.normal(0.3))
    follows = {"items": fr.VocabularyConfig(items, [table], [HISTORY])}
    tables = fr.dynamic_tables(fr.init(fr.key(0), [table]), follows, key=fr.key(0))
    params = fr.Params(tables, params_of(name).dense)
    step = fr.train_step(fr.models.next_item_loss(MODELS[name], **how), sparse=fr.optim.sgd(0.1))
    with pytest.raises(ValueError, match="are those of a vocabulary"):
        step(step.init(params), batch_of(BAGS))
    with pytest.raises(ValueError, match="are those of a vocabulary"):
        MODELS[name].items(params)
    assert MODELS[name].query(params, batch_of(BAGS)).shape == (len(BAGS), D)
