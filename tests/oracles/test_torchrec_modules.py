"""Lookups, training steps, layers and schedules equal those of TorchRec's modules and optimizers with equal weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

pytest.importorskip("torchrec")
from torchrec.models import dlrm as tr_dlrm
from torchrec.modules import crossnet as tr_cross
from torchrec.modules.activation import SwishLayerNorm
from torchrec.modules.deepfm import FactorizationMachine
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

TABLES = (fr.TableConfig("item", 7, 4), fr.TableConfig("user", 5, 8))
# a shared table, and a shared column
COLUMNS = {"item": ("clicked", "bought"), "user": ("user", "bought")}
PLACES = [(t, c) for t, columns in COLUMNS.items() for c in columns]
IDS = {"keys": ("bought", "user", "clicked"), "elements": st.integers(0, 4), "min_bags": 1}


def normal(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def theirs(ids):
    ids = ids.unpad()
    return KeyedJaggedTensor(list(ids.keys), ids.values, ids.weights, lengths=ids.lengths)


def features(pooling, *, weighted=False):
    """Return our features for PLACES, with TorchRec's names for a column that several tables read."""
    name = lambda table, column: f"{column}@{table}" if column == "bought" else column
    return tuple(fr.FeatureConfig(name(t, c), t, pooling, weighted=weighted, column=c) for t, c in PLACES)


def collection(cls, config, tables=TABLES, each=(), **options):
    """Return (TorchRec's module over `tables` with our tables as its weights, these weights). `each` holds options of
    each config."""
    torch.manual_seed(0)
    configs = [
        config(
            name=t.name, num_embeddings=t.num_embeddings, embedding_dim=t.embedding_dim,
            feature_names=list(COLUMNS[t.name]), **dict(each),
        )
        for t in tables
    ]  # fmt: skip
    module = cls(configs, **options)
    return module, weights_of(module, lambda w: w.detach().clone())


def weights_of(module, read=torch.Tensor.detach):
    """Return {table: read(the table's weight)}. The weights of a fused module are no parameters, so its state dict is
    read."""
    found = dict(module.named_parameters()) or module.state_dict()
    return {name.split(".")[-2]: read(w) for name, w in found.items()}


# -- lookups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pooling", "weighted"), [("sum", False), ("mean", False), ("sum", True)], ids=["sum", "mean", "weighted_sum"]
)
@given(ids=frs.keyed_jagged_tensors(weighted=True, **IDS), seed=st.integers(0, 99))
def test_lookup_is_an_embedding_bag_collection(pooling, weighted, ids, seed):
    """lookup over shared tables and columns equals EmbeddingBagCollection. lookup_transpose equals the gradient of that
    module."""
    each = {"pooling": PoolingType[pooling.upper()]}
    module, tables = collection(EmbeddingBagCollection, EmbeddingBagConfig, each=each, is_weighted=weighted)
    mine = features(pooling, weighted=weighted)
    want, got = module(theirs(ids)), fr.lookup(tables, ids, mine)
    assert (list(got.keys), list(got.dims)) == (want.keys(), want.length_per_key())
    assert_trees_close(got.values, want.values().detach(), rtol=1e-6, atol=1e-6)
    d_values = normal(seed, *got.values.shape, dtype=torch.float32)
    want.values().backward(d_values)
    grads = fr.lookup_transpose(fr.KeyedTensor(d_values, got.keys, got.dims), ids, mine, tables)
    dense = {n: g.to_dense() for n, g in grads.items()}
    assert_trees_close(dense, weights_of(module, lambda w: w.grad), rtol=1e-6, atol=1e-5)


@given(ids=frs.keyed_jagged_tensors(weighted=False, **IDS), seed=st.integers(0, 99))
def test_lookup_sequence_is_an_embedding_collection(ids, seed):
    """lookup_sequence equals EmbeddingCollection, bag by bag. The transpose of lookup_sequence equals the gradient of
    that module."""
    same_dim = (TABLES[0], fr.TableConfig("user", 5, 4))
    module, tables = collection(EmbeddingCollection, EmbeddingConfig, same_dim)
    mine = features("none")
    want, got = module(theirs(ids)), fr.lookup_sequence(tables, ids, mine)
    assert list(got) == list(want)
    d = {
        k: fr.JaggedTensor(normal(seed + i, *x.values.shape).float(), x.offsets) for i, (k, x) in enumerate(got.items())
    }
    for k, x in got.items():
        assert_trees_close((x.unpad().values, x.lengths), (want[k].values().detach(), want[k].lengths()))
    torch.autograd.backward([x.values() for x in want.values()], [d[k].unpad().values for k in want])
    grads = fr.lookup_sequence_transpose(d, ids, mine, tables)
    dense = {n: g.to_dense() for n, g in grads.items()}
    assert_trees_close(dense, weights_of(module, lambda w: w.grad), rtol=1e-6, atol=1e-5)


@given(frs.jagged_tensors(dtypes=(torch.int64,), weighted=False, min_bags=1, max_length=4), st.integers(0, 99))
def test_position_weights_are_their_module(bags, seed):
    """position_weights and its gradient equal those of PositionWeightedModule for bags within the module's length."""
    module, layer = PositionWeightedModule(4), fr.nn.position_weights(4)
    module.position_weight.data.copy_(normal(seed, 4))
    end = int(bags.offsets[-1])
    got, transpose = torch.func.vjp(lambda w: layer.apply(w, bags)[:end], module.position_weight.detach().clone())
    want = module(JaggedTensor(bags.unpad().values, offsets=bags.offsets)).weights()
    assert_trees_close(got, want.detach())
    d_weights = normal(seed + 1, end, dtype=torch.float32)
    want.backward(d_weights)
    assert_trees_close(transpose(d_weights)[0], module.position_weight.grad, rtol=1e-6, atol=1e-6)


@given(
    ids=frs.keyed_jagged_tensors(keys=("a", "b", "c"), dtypes=(torch.int64,), weighted=False, min_bags=1),
    seed=st.integers(0, 99),
)
def test_position_weights_of_some_keys_are_their_collection(ids, seed):
    """The weights and their gradients equal PositionWeightedModuleCollection's, which has no weights for key b: extra
    keys have ones (their pull request 1299), and weighted and unweighted features mix (989)."""
    sizes = {"a": 4, "c": 5}
    module, layer = PositionWeightedModuleCollection(sizes), fr.nn.position_weights(sizes)
    for i, (k, n) in enumerate(sizes.items()):
        module.position_weights[k].data.copy_(normal(seed + i, n))
    params = {k: w.detach().clone() for k, w in module.position_weights.items()}
    end = int(ids.offsets[-1])
    got, transpose = torch.func.vjp(lambda w: layer.apply(w, ids).weights[:end], params)
    want = module(theirs(ids.unpad())).weights()
    assert_trees_close(got, want.detach())
    d = normal(seed + 9, end, dtype=torch.float32)
    want.backward(d)
    grads = {k: torch.zeros_like(w) if w.grad is None else w.grad for k, w in module.position_weights.items()}
    assert_trees_close(transpose(d)[0], grads, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("extra", [False, True])
def test_position_weights_before_a_lookup_are_their_feature_processor(extra):
    """FeatureProcessedEmbeddingBagCollection has the values and gradients of position_weights and lookup, also where
    ids have a key more than the tables (1299), and where bags are as long as max_length (2090, 70)."""
    lists = {"a": [[0, 1, 2], [3], []], "b": [[1], [2, 0], [3]]} | ({"c": [[9], [], [9, 9]]} if extra else {})
    ids, sizes = fr.KeyedJaggedTensor.from_lists(lists), {"a": 3, "b": 2}
    configs = [EmbeddingBagConfig(num_embeddings=4, embedding_dim=4, name=f"t_{k}", feature_names=[k]) for k in "ab"]
    module = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(tables=configs, is_weighted=True), PositionWeightedModuleCollection(sizes)
    )
    weights = module._feature_processors.position_weights
    for i, k in enumerate(sizes):
        weights[k].data.copy_(normal(i, sizes[k]))
    tables = {f"t_{k}": module._embedding_bag_collection.embedding_bags[f"t_{k}"].weight for k in "ab"}
    params = fr.Params(
        {n: t.detach().clone() for n, t in tables.items()}, {k: w.detach().clone() for k, w in weights.items()}
    )
    features = [fr.FeatureConfig(k, table=f"t_{k}", weighted=True) for k in "ab"]
    layer = fr.nn.position_weights(sizes)
    loss = lambda p, ids: fr.lookup(p.tables, layer.apply(p.dense, ids), features).values.sin().sum()
    value, grads = fr.value_and_grad(loss)(params, ids)
    want = module(theirs(ids)).values().sin().sum()
    want.backward()
    assert_trees_close(value, want.detach(), rtol=1e-5, atol=1e-6)
    assert_trees_close(grads.dense, {k: w.grad for k, w in weights.items()}, rtol=1e-5, atol=1e-6)
    dense = {n: g.to_dense() for n, g in grads.tables.items()}
    assert_trees_close(dense, {n: t.grad for n, t in tables.items()}, rtol=1e-5, atol=1e-6)


def test_longer_bags_are_theirs_to_refuse():
    """Bags beyond max_length break TorchRec's gather (2090); here they weigh 0."""
    ids, sizes = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2, 3]]}), {"a": 2}
    with pytest.raises(RuntimeError):
        PositionWeightedModuleCollection(sizes)(theirs(ids))
    layer = fr.nn.position_weights(sizes)
    assert layer.apply(layer.init(fr.key(0)), ids).weights.tolist() == [1.0, 1.0, 0.0]


# -- training ----------------------------------------------------------------------------------------------------

LR, EPS, STEPS = 0.1, 1e-6, 5
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
RULES = {  # name -> (our optimizer, the optimizer class of TorchRec, the arguments of the class)
    "sgd": (fr.optim.sgd(LR), torch.optim.SGD, {"lr": LR}),
    "adagrad": (fr.optim.adagrad(LR, eps=EPS), torch.optim.Adagrad, {"lr": LR, "eps": EPS}),
    "rowwise_adagrad": (fr.optim.rowwise_adagrad(LR, eps=EPS), RowWiseAdagrad, {"lr": LR, "eps": EPS}),
}
WIDTH = sum(t.embedding_dim * len(COLUMNS[t.name]) for t in TABLES)


def click_batches(num_bags=6):
    """Yield STEPS batches of labels and ids. The ids repeat, within bags and across features."""
    draw = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (3 * num_bags,), generator=draw)
        values = torch.randint(0, 4, (int(lengths.sum()),), generator=draw)
        ids = fr.KeyedJaggedTensor.from_lengths(IDS["keys"], values, lengths)
        yield fr.Batch(ids, torch.randint(0, 2, (num_bags,), generator=draw).float())


def train_theirs(module, sparse, dense, dense_opt):
    """Return the losses of a linear model over the pooled features of `module`. The weights of the module change in
    place."""
    losses = []
    for batch in click_batches():
        logits = module(theirs(batch.ids)).values() @ dense
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        for opt in (sparse, dense_opt):
            opt.zero_grad()
        loss.backward()
        for opt in (sparse, dense_opt):
            opt.step()
        losses.append(loss.detach())
    return losses


def train_ours(tables, sparse, dense, rate):
    """Return the last state and the losses of the same model under train_step."""

    def loss_fn(params, batch):
        logits = fr.lookup(params.tables, batch.ids, features("sum")).values @ params.dense
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)

    step = fr.train_step(loss_fn, sparse=sparse, dense=fr.optim.dense(torch.optim.SGD, lr=rate))
    state, losses = step.init(fr.Params(tables, dense)), []
    for batch in click_batches():
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, losses


def slots_of(module, opt, fused):
    """Return {table: the table's accumulator} from the place where TorchRec keeps it."""
    if not fused:
        return weights_of(module, lambda w: opt.state[w]["sum"].squeeze(-1))
    state = opt.state_dict()["state"]
    return {name.split(".")[-2]: next(iter(slots.values())) for name, slots in state.items()}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "after_backward"])
@pytest.mark.parametrize("name", RULES)
def test_five_steps_train_the_same(name, fused):
    """Five steps of train_step give the losses, tables, slots and dense weights of TorchRec, fused or not."""
    sparse, cls, options = RULES[name]
    in_backward = {"optimizer_type": cls, "optimizer_kwargs": options} if fused else {}
    module_cls = FusedEmbeddingBagCollection if fused else EmbeddingBagCollection
    module, tables = collection(module_cls, EmbeddingBagConfig, **in_backward)
    opt = module.fused_optimizer() if fused else cls(module.parameters(), **options)
    start = normal(1, WIDTH, dtype=torch.float32)
    dense = torch.nn.Parameter(start.clone())
    losses = train_theirs(module, opt, dense, torch.optim.SGD([dense], lr=LR))
    state, mine = train_ours(tables, sparse, start, LR)
    assert_trees_close(mine, losses, **CLOSE)
    assert_trees_close((state.tables, state.dense), (weights_of(module), dense.detach()), **CLOSE)
    if name != "sgd":
        held = {n: slots["sum"] for n, slots in state.slots.items()}
        assert_trees_close(held, slots_of(module, opt, fused), **CLOSE)
    # training moved every table
    assert all(not torch.equal(state.tables[n], tables[n]) for n in tables)


# -- schedules ---------------------------------------------------------------------------------------------------


@st.composite
def stages(draw):
    """Return one to three random stages for which both definitions agree: no inv_sqrt at step 0, no poly after its
    decay_iters."""
    found, end = [], 0
    for i in range(draw(st.integers(1, 3))):
        start, end = end, end + draw(st.integers(1, 4))
        policies = fr.optim.Stage.__annotations__["policy"].__args__
        policy = draw(st.sampled_from([p for p in policies if i or p != "inv_sqrt"]))
        more = {"decay_iters": end + draw(st.integers(0, 3))} if policy == "poly" else {}
        if policy == "step":
            more = {"decay_iters": draw(st.sampled_from([None, 1, 3]))}
        if policy == "interpolate":
            more = {"start_interpolating_iters": start, "end_value": draw(st.sampled_from([0.0, 2.0]))}
        value, scale = draw(st.sampled_from([0.25, 0.5, 1.5])), draw(st.sampled_from([1.0, 0.5]))
        found.append(fr.optim.Stage(policy, end, value, scale, sgdr_period=draw(st.integers(1, 3)), **more))
    return found


def their_stage(stage):
    values = {**vars(stage), "policy": WarmupPolicy(stage.policy)}
    return WarmupStage(**{k: v for k, v in values.items() if k != "decay_iters" or v is not None})


def warmup(params, ours):
    """Return TorchRec's optimizer: plain SGD of `params` under these stages."""
    inner = KeyedOptimizerWrapper(params, lambda ps: torch.optim.SGD(ps, lr=LR))
    return WarmupOptimizer(inner, [their_stage(s) for s in ours], lr=LR)


@given(stages())
def test_schedule_is_their_warmup(ours):
    """For every policy, the rate equals that of WarmupOptimizer at every step, through every stage and after the last
    stage."""
    w = torch.nn.Parameter(torch.zeros(1))
    opt, rate, want = warmup({"w": w}, ours), fr.optim.schedule(ours, lr=LR), []
    count = ours[-1].max_iters + 3
    for _ in range(count):
        want.append(opt.param_groups[0]["lr"])
        w.grad = torch.ones(1)
        opt.step()
    got = torch.stack([rate(torch.tensor(step)) for step in range(count)])
    assert_trees_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("stage", "step", "want", "got"),
    [
        (fr.optim.Stage("inv_sqrt", 9), 0, ZeroDivisionError, LR),
        (fr.optim.Stage("poly", 9, 0.5, decay_iters=3), 6, ValueError, 0.0),
        (fr.optim.Stage("poly", 9, 1.0, decay_iters=3), 6, -LR, 0.0),
        (fr.optim.Stage("poly", 9, 2.0, decay_iters=3), 6, LR, 0.0),
    ],
    ids=["inv_sqrt_at_0", "poly_of_a_root", "poly_turns_negative", "poly_rises_again"],
)
def test_schedule_differs_where_theirs_breaks(stage, step, want, got):
    """At step 0 of inv_sqrt and after the end of poly we return a limit, where TorchRec raises or leaves the curve."""
    w = torch.nn.Parameter(torch.zeros(1))

    def theirs_at(step):
        opt = warmup({"w": w}, [stage])
        opt._set_lr(step, 0)
        return opt.param_groups[0]["lr"]

    assert float(fr.optim.schedule([stage], lr=LR)(step)) == pytest.approx(got)
    if isinstance(want, float):
        assert theirs_at(step) == pytest.approx(want)
    else:
        with pytest.raises(want):
            theirs_at(step)


def test_training_under_warmup():
    """train_step with one schedule as its rates gives the weights of TorchRec's module under WarmupOptimizer."""
    plan = [fr.optim.Stage("linear", 2, 0.1), fr.optim.Stage("constant", 3, 0.5)]
    module, tables = collection(EmbeddingBagCollection, EmbeddingBagConfig)
    start = normal(1, WIDTH, dtype=torch.float32)
    dense = torch.nn.Parameter(start.clone())
    losses = train_theirs(module, warmup(dict(module.named_parameters()), plan), dense, warmup({"w": dense}, plan))
    rate = fr.optim.schedule(plan, lr=LR)
    state, mine = train_ours(tables, fr.optim.sgd(rate), start, rate)
    assert_trees_close(mine, losses, **CLOSE)
    assert_trees_close((state.tables, state.dense), (weights_of(module), dense.detach()), **CLOSE)


# -- layers ------------------------------------------------------------------------------------------------------


def check_layer(module, apply, params, read, *inputs):
    """Check that apply(params, *inputs) and its gradients equal those of module(*inputs). `read` makes our tree from
    the tensors of the module."""
    want = module(*inputs)
    got, transpose = torch.func.vjp(apply, params, *inputs)
    assert_trees_close(got, want.detach(), rtol=1e-10, atol=1e-12)
    d_out = normal(99, *got.shape)
    for p in module.parameters():
        p.grad = None
    want.backward(d_out)
    assert_trees_close(transpose(d_out)[0], read(lambda p: p.grad), rtol=1e-10, atol=1e-12)


def filled(module):
    """Return the module in f64 with random parameters, because zero biases would hide a mistake."""
    for i, p in enumerate(module.double().parameters()):
        p.data.copy_(normal(i, *p.shape))
    return module


@pytest.mark.parametrize("rank", [None, 2])
def test_cross_network_is_theirs(rank):
    """cross_network and its gradients equal CrossNet. With U = W and V = V, they equal those of LowRankCrossNet."""
    module = filled(tr_cross.CrossNet(6, 3) if rank is None else tr_cross.LowRankCrossNet(6, 3, rank))
    parts = {"weight": "kernels"} if rank is None else {"u": "W_kernels", "v": "V_kernels"}

    def read(of):
        tensors = {ours: getattr(module, name) for ours, name in parts.items()}
        layers = [{ours: of(own[i]) for ours, own in tensors.items()} for i in range(3)]
        return [{**own, "bias": of(b).flatten()} for own, b in zip(layers, module.bias)]

    layer = fr.nn.cross_network(6, 3, rank)
    check_layer(module, layer.apply, read(lambda p: p.detach().clone()), read, normal(7, 5, 6))


def test_vector_cross_network_is_theirs():
    """vector_cross_network and its gradients equal VectorCrossNet's."""
    module = filled(tr_cross.VectorCrossNet(6, 3))
    pairs = lambda: zip(module.kernels, module.bias, strict=True)
    read = lambda of: [{"weight": of(w).T, "bias": of(b).flatten()} for w, b in pairs()]
    layer = fr.nn.vector_cross_network(6, 3)
    check_layer(module, layer.apply, read(lambda p: p.detach().clone()), read, normal(7, 5, 6))


def test_mixture_cross_network_is_theirs():
    """mixture_cross_network and its gradients equal LowRankMixtureCrossNet's."""
    module = filled(tr_cross.LowRankMixtureCrossNet(6, 2, num_experts=3, low_rank=2, activation=torch.tanh))
    kernels = {"u": module.U_kernels, "c": module.C_kernels, "v": module.V_kernels}

    def read(of):
        layers = [
            {n: of(own[i]) for n, own in kernels.items()} | {"bias": of(module.bias[i]).flatten()} for i in range(2)
        ]
        return {"gate": torch.cat([of(g.weight) for g in module.gates]), "layers": layers}

    layer = fr.nn.mixture_cross_network(6, 2, 3, 2, activation=torch.tanh)
    check_layer(module, layer.apply, read(lambda p: p.detach().clone()), read, normal(7, 5, 6))


def test_swish_layer_norm_is_theirs():
    """swish_layer_norm and its gradients equal SwishLayerNorm's."""
    module = filled(SwishLayerNorm(6))
    read = lambda of: {"weight": of(module.norm[0].weight), "bias": of(module.norm[0].bias)}
    check_layer(module, fr.nn.swish_layer_norm(6).apply, read(lambda p: p.detach().clone()), read, normal(7, 5, 6))


def read_linear(of, linears):
    return {"linear": [{"weight": of(m.weight), "bias": of(m.bias)} for m in linears]}


def test_mlp_is_theirs():
    """mlp with a final ReLU, and its gradients, equal those of MLP."""
    module = filled(MLP(5, [4, 3]))
    read = lambda of: read_linear(of, [m._linear for m in module._mlp])
    layer = fr.nn.mlp((5, 4, 3), final_activation=torch.relu)
    check_layer(module, layer.apply, read(lambda p: p.detach().clone()), read, normal(7, 6, 5))


def test_factorization_machine_of_scalars_is_theirs():
    """The machine of TorchRec multiplies all pairs of numbers, even within one vector. For vectors of one dimension,
    that machine equals ours."""
    x, module = normal(0, 3, 4, 2), FactorizationMachine()
    want = module(list(x.unbind(1))).squeeze(1)
    assert_trees_close(fr.nn.factorization_machine(x.flatten(1)[..., None]), want, rtol=1e-10)
    ours = fr.nn.factorization_machine(x)
    by_dim = sum(module([x[:, f, d, None] for f in range(4)]) for d in range(2)).squeeze(1)
    assert_trees_close(ours, by_dim, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(ours, want)


def upper_order(count):
    """Return the positions of the products (i, j), i < j, in the order of `dot_interaction`, listed in TorchRec's
    order."""
    return [j * (j - 1) // 2 + i for i in range(count) for j in range(i + 1, count)]


def test_dot_interaction_is_theirs_in_another_order():
    """InteractionArch gives the dense vector and dot_interaction of all vectors. The order there is by rows of the
    upper triangle. Our order is by rows of the lower triangle."""
    dense, sparse = normal(0, 3, 4), normal(1, 3, 5, 4)
    ours = fr.nn.dot_interaction(torch.cat([dense[:, None], sparse], 1))[:, upper_order(6)]
    want = tr_dlrm.InteractionArch(5)(dense, sparse)
    assert_trees_close(torch.cat([dense, ours], 1), want, rtol=1e-10, atol=1e-12)


def test_dlrm_is_theirs():
    """models.dlrm with keep="dense" gives the logits of DLRM. The first weights of the top layers are reordered to our
    order of products."""
    configs = [EmbeddingBagConfig(name=n, num_embeddings=5, embedding_dim=4, feature_names=[n]) for n in "abc"]
    module = filled(tr_dlrm.DLRM(EmbeddingBagCollection(configs), 3, [6, 4], [8, 7, 1]))
    hidden, out = module.over_arch.model
    top = read_linear(lambda p: p.detach().clone(), [m._linear for m in hidden._mlp])
    first = top["linear"][0]["weight"]
    columns = torch.argsort(torch.tensor(upper_order(4))) + 4
    top["linear"][0]["weight"] = torch.cat([first[:, :4], first[:, columns]], 1)
    bottom = read_linear(lambda p: p.detach(), [m._linear for m in module.dense_arch.model._mlp])
    last = {"weight": out.weight.detach(), "bias": out.bias.detach()}
    params = fr.Params(weights_of(module.sparse_arch), {"bottom": bottom, "mlp": top, "out": last})

    tables = [fr.TableConfig(n, 5, 4, dtype=torch.float64) for n in "abc"]
    singles = [fr.FeatureConfig(n, table=n) for n in "abc"]
    model = fr.models.dlrm(tables, singles, num_dense=3, bottom=(6, 4), sizes=(8, 7), keep="dense")
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1], [2, 2], []], "b": [[0], [4], [3]], "c": [[], [1, 2], [3]]})
    dense = normal(9, 3, 3)
    want = module(dense, theirs(ids)).squeeze(1).detach()
    got = model.apply(params, fr.Batch(ids, torch.zeros(3), dense))
    # TorchRec converts pooled rows to f32 before the top layers
    assert_trees_close(got, want.to(got.dtype), rtol=1e-5, atol=1e-5)
