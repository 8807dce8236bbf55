"""Laws of funcrec.models: one table of small models, one list of laws, then parameter counts and two towers."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.small_models import (
    EACH,
    FEATURES,
    MODELS,
    TABLES,
    WIDE,
    B,
    close,
    make,
    make_batch,
    numbers,
    with_dense_bumps,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as torch_tree

import funcrec as fr
from funcrec import models, nn


@EACH
def test_apply_is_one_logit_per_example(name):
    """apply gives finite f32[B], whatever the padding of the ids holds."""
    model, params, batch = make(name)
    params = with_dense_bumps(params)
    logits = model.apply(params, batch)
    assert logits.shape == (B,) and logits.dtype == torch.float32 and torch.isfinite(logits).all()
    bare = fr.Batch(batch.ids.unpad(), batch.label, batch.dense)
    torch.testing.assert_close(model.apply(params, bare), logits)


@EACH
def test_an_example_is_evaluated_on_its_own(name):
    """In evaluation, the logit of an example does not depend on the other examples in its batch."""
    model, params, batch = make(name)
    params = with_dense_bumps(params)
    rows = [
        fr.Batch(batch.ids[i], batch.label[i : i + 1], None if batch.dense is None else batch.dense[i : i + 1])
        for i in range(B)
    ]
    torch.testing.assert_close(torch.cat([model.apply(params, r) for r in rows]), model.apply(params, batch))


@EACH
def test_init_is_a_function_of_the_key(name):
    """A key draws the same parameters every time, and they include every table of the model."""
    model = MODELS[name]()
    first, second = model.init(fr.key(3)), model.init(fr.key(3))
    close((first.tables, first.dense), (second.tables, second.dense), rtol=0, atol=0)
    assert {k: tuple(v.shape) for k, v in first.tables.items()} == {t.name: t.shape for t in model.tables}


@EACH
def test_training_is_evaluation_without_dropout_and_batch_norm(name):
    """train_apply is a function of the key. Without dropout and batch norm it equals apply."""
    model, params, batch = make(name)
    first, stats = model.train_apply(params, batch, fr.key(1))
    assert torch.equal(first, model.train_apply(params, batch, fr.key(1))[0])
    random = name in ("wide_deep", "deepfm", "dlrm", "dcnv2")
    assert random != torch.equal(first, model.train_apply(params, batch, fr.key(2))[0])
    normed = "stats" in params.dense
    assert normed == bool(stats) == (name in ("wide_deep, batch norm", "dcnv2"))
    if not random and not normed:
        torch.testing.assert_close(first, model.apply(params, batch), rtol=0, atol=0)


@EACH
def test_value_and_grad_is_dense_autograd(name):
    """fr.value_and_grad of the loss gives the loss and the gradients of torch's autograd with dense tables."""
    model, params, batch = make(name)
    params = with_dense_bumps(params)
    loss_fn = models.loss(model)
    (loss, aux), grads = fr.value_and_grad(loss_fn, has_aux=True)(params, batch, key=fr.key(1))

    leaves, structure = torch_tree.tree_flatten(params)
    leaves = [x.clone().requires_grad_() for x in leaves]
    expected, _ = loss_fn(torch_tree.tree_unflatten(leaves, structure), batch, key=fr.key(1))
    found = torch.autograd.grad(expected, leaves, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    found = torch_tree.tree_unflatten(found, structure)

    torch.testing.assert_close(loss, expected.detach())
    assert aux["logits"].shape == (B,)
    close(grads.dense, found.dense, rtol=1e-5, atol=1e-6)
    dense_tables = {k: g.to_dense() for k, g in grads.tables.items()}
    close(dense_tables, found.tables, rtol=1e-5, atol=1e-6)
    assert all(g.abs().sum() > 0 for g in found.tables.values())
    close(grads.dense.get("stats", []), torch_tree.tree_map(torch.zeros_like, params.dense.get("stats", [])))


@EACH
def test_traced_is_eager(name):
    """The loss and its gradients, traced with fake tensors, give the bits of eager mode."""
    model, params, batch = make(name)
    args = params, batch, fr.key(1)
    leaves, structure = torch_tree.tree_flatten(args)
    step = fr.value_and_grad(models.loss(model), has_aux=True)

    def flat(*tensors):
        params, batch, key = torch_tree.tree_unflatten(list(tensors), structure)
        return torch_tree.tree_leaves(step(params, batch, key=key))

    graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    close(graph(*leaves), flat(*leaves), rtol=0, atol=0)


@EACH
def test_vmap_over_an_ensemble_is_a_loop(name):
    """vmap of apply over stacked parameters equals the loop over the members."""
    model, _, batch = make(name)
    members = [model.init(fr.key(i)) for i in range(3)]
    stacked = torch_tree.tree_map(lambda *xs: torch.stack(xs), *members)
    out = torch.func.vmap(model.apply, in_dims=(0, None))(stacked, batch)
    torch.testing.assert_close(out, torch.stack([model.apply(p, batch) for p in members]), rtol=1e-5, atol=1e-6)


@EACH
def test_training_lowers_the_loss(name):
    """Thirty steps down the gradient on one batch lower the loss of that batch."""
    model, params, batch = make(name)
    step, losses = fr.value_and_grad(models.loss(model), has_aux=True), []
    for i in range(30):
        (loss, aux), grads = step(params, batch, key=fr.key(i))
        losses.append(float(loss))
        down = lambda x, g: x - 0.1 * g
        tables = {k: down(t, grads.tables[k].to_dense()) for k, t in params.tables.items()}
        dense = models.merge_stats(torch_tree.tree_map(down, params.dense, grads.dense), aux)
        params = fr.Params(tables, dense)
    assert sum(losses[-5:]) < sum(losses[:5])


@given(st.lists(st.tuples(st.floats(-30, 30), st.booleans()), min_size=1, max_size=8))
def test_loss_is_the_mean_of_the_cross_entropies(examples):
    """loss = mean softplus(z) - y z, plus the penalty."""
    z = torch.tensor([x for x, _ in examples], dtype=torch.float64)
    y = torch.tensor([float(label) for _, label in examples], dtype=torch.float64)
    unused = lambda *given: pytest.fail("the loss needs it not")
    model = models.Model((), (), unused, unused, lambda params, batch, key: (z, {}), lambda dense: torch.tensor(5.0))
    ids = fr.KeyedJaggedTensor.from_lists({"user": [[]] * len(examples)})
    loss, _ = models.loss(model)(fr.Params({}, {}), fr.Batch(ids, y), key=fr.key(0))
    expected = (torch.nn.functional.softplus(z, threshold=100) - y * z).mean() + 5
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


def test_statistics_follow_the_batches():
    """merge_stats updates the running statistics and no other leaf. Evaluation reads the running statistics."""
    model, params, batch = make("wide_deep, batch norm")
    _, aux = models.loss(model)(params, batch, key=fr.key(1))
    dense = models.merge_stats(params.dense, aux)
    close({k: v for k, v in dense.items() if k != "stats"}, {k: v for k, v in params.dense.items() if k != "stats"})
    assert not torch.equal(dense["stats"][0]["mean"], params.dense["stats"][0]["mean"])
    assert not torch.equal(model.apply(fr.Params(params.tables, dense), batch), model.apply(params, batch))


def test_a_penalty_is_the_sum_of_the_matrices_norms():
    """dcnv2's penalty is cross_penalty · Σ ‖W‖, with the biases left out."""
    model = MODELS["dcnv2"]()
    dense = with_dense_bumps(model.init(fr.key(0))).dense
    expected = 0.1 * sum(float(layer["weight"].norm()) for layer in dense["cross"])
    assert float(model.penalty(dense)) == pytest.approx(expected, rel=1e-6)


# -- parameter counts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("lr", 171_004), ("fm", 171_004), ("deepfm", 331_773), ("widedeep", 331_773), ("dlrm", 337_149),
        ("dcnv2", 292_317),
    ],
)  # fmt: skip
def test_ml1m_has_the_published_number_of_parameters(name, count):
    """The number of parameters, without running statistics, is the number that RecBole published."""
    model = models.ml1m(name)
    assert models.num_parameters(model.init(fr.key(0))) == count
    assert {f.key for f in model.features} == {
        "user_id", "item_id", "age", "gender", "occupation", "release_year", "genre",
    }  # fmt: skip


def test_mlperf_has_the_reference_sizes():
    """The model has 204,184,588 rows of 128, 214 ids per example, and the dense parameters of the reference. The test
    counts the parameters on the meta device."""
    model = models.mlperf_dlrm_dcnv2()
    params = model.init(fr.key(0).to("meta"))
    stack = lambda *sizes: sum(a * b + b for a, b in itertools.pairwise(sizes))
    dense = stack(13, 512, 256, 128) + 3 * (2 * 3456 * 512 + 3456) + stack(3456, 1024, 1024, 512, 256, 1)
    assert models.num_parameters(params) == 204_184_588 * 128 + dense
    assert len(model.tables) == 26 and sum(f.max_length for f in model.features) == 214


def test_mlperf_cut_to_size_takes_the_same_ids():
    """With max_rows no table has more rows than max_rows, and ids of the full tables are hashed into these rows."""
    model = models.mlperf_dlrm_dcnv2(max_rows=50, embedding_dim=4)
    assert max(t.num_embeddings for t in model.tables) == 50
    params = model.init(fr.key(0))
    ids = fr.KeyedJaggedTensor.from_lists({f.name: [[39_999_999], [2]] for f in model.features})
    batch = fr.Batch(ids, torch.zeros(2), numbers(0, 2, 13))
    small = fr.KeyedJaggedTensor.from_lists({f.name: [[49], [2]] for f in model.features})
    cut = [f.name for f, t in zip(model.features, model.tables, strict=True) if f.hash is not None]
    assert len(cut) == 26 - sum(t.num_embeddings < 50 for t in model.tables)
    assert torch.isfinite(model.apply(params, batch)).all()
    lookups = [fr.lookup(params.tables, i, [f for f in model.features if f.hash]).values for i in (ids, small)]
    assert torch.equal(*lookups)


# -- two towers --------------------------------------------------------------------------------------------------

QUERY, CANDIDATE = FEATURES[:2], FEATURES[2:]


def towers(**kwargs):
    return models.two_tower(TABLES, QUERY, CANDIDATE, sizes=(8, 3), **kwargs)


def test_towers_are_unit_vectors_of_their_own_columns():
    """query and candidate have norm 1. Each of them reads only its own columns."""
    model = towers()
    params, batch = with_dense_bumps(model.init(fr.key(0))), make_batch()
    q, c = model.query(params, batch), model.candidate(params, batch)
    torch.testing.assert_close(torch.cat([q, c]).norm(dim=1), torch.ones(2 * B))
    own = lambda *keys: fr.Batch(batch.ids.permute(keys), batch.label)
    assert torch.equal(model.query(params, own("user", "clicked")), q)
    assert torch.equal(model.candidate(params, own("bought")), c)
    torch.testing.assert_close(model.apply(params, batch), (q * c).sum(1) / model.temperature)


@given(st.integers(1, 6), st.integers(0, 1000), st.floats(-5, 0))
def test_in_batch_softmax_ignores_a_constant_log_q(num, seed, constant):
    """A constant log Q and distinct candidate ids change no loss. The loss equals the cross entropy of torch."""
    q, c = numbers(seed, num, 3).double(), numbers(seed + 1, num, 3).double()
    plain = models.in_batch_softmax(q, c, temperature=0.5)
    expected = torch.nn.functional.cross_entropy(q @ c.T / 0.5, torch.arange(num))
    torch.testing.assert_close(plain, expected)
    same = models.in_batch_softmax(
        q, c, temperature=0.5, log_q=torch.full((num,), constant).double(), candidate_ids=torch.arange(num)
    )
    torch.testing.assert_close(same, plain)


def test_log_q_corrects_each_candidate():
    """log Q is subtracted from its candidate's logits, for every query."""
    q, c, log_q = numbers(0, 4, 3), numbers(1, 4, 3), -numbers(2, 4).abs()
    loss = models.in_batch_softmax(q, c, log_q=log_q)
    expected = torch.nn.functional.cross_entropy(q @ c.T - log_q[None, :], torch.arange(4))
    torch.testing.assert_close(loss, expected)


def test_a_repeated_candidate_is_no_negative():
    """With candidate ids, two rows of one candidate are not negatives of each other."""
    q, c = numbers(0, 3, 2), numbers(1, 3, 2)
    loss = models.in_batch_softmax(q, c, candidate_ids=torch.tensor([4, 9, 4]))
    logits = q @ c.T
    logits[0, 2] = logits[2, 0] = -torch.inf
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, torch.arange(3)))


def test_two_tower_gradients_are_dense_autograd():
    """Gradients of the in-batch loss through both towers equal those of dense autograd, with dropout, a correction and
    repeated candidates."""
    model = towers(dropout=0.2)
    params, batch = with_dense_bumps(model.init(fr.key(0))), make_batch()
    loss_fn = models.in_batch_softmax_loss(
        model, log_q=lambda b: -numbers(3, B).abs(), candidate_ids=lambda b: b.ids["user"].to_padded(1)[:, 0]
    )
    (loss, aux), grads = fr.value_and_grad(loss_fn, has_aux=True)(params, batch, key=fr.key(1))
    plain = lambda tables, dense: loss_fn(fr.Params(tables, dense), batch, key=fr.key(1))[0]
    d_tables, d_dense = torch.func.grad(plain, argnums=(0, 1))(params.tables, params.dense)
    close(grads.dense, d_dense, rtol=1e-5, atol=1e-6)
    close({k: g.to_dense() for k, g in grads.tables.items()}, d_tables, rtol=1e-5, atol=1e-6)
    assert aux["stats"] == {} and torch.isfinite(loss)


def test_a_user_can_compose_their_own():
    """A loss that a user composes of lookup and nn layers has the gradients of the ready model with the same
    formula."""
    model, params, batch = make("fm")

    def mine(p, b, *, key):
        pairs = nn.factorization_machine(fr.lookup(p.tables, b.ids, FEATURES).stack())
        z = p.dense["bias"] + fr.lookup(p.tables, b.ids, WIDE).values.sum(1) + pairs
        return torch.nn.functional.binary_cross_entropy_with_logits(z, b.label), {}

    (a, _), x = fr.value_and_grad(mine, has_aux=True)(params, batch, key=fr.key(0))
    (b, _), y = fr.value_and_grad(models.loss(model), has_aux=True)(params, batch, key=fr.key(0))
    torch.testing.assert_close(a, b)
    close({k: g.to_dense() for k, g in x.tables.items()}, {k: g.to_dense() for k, g in y.tables.items()})
