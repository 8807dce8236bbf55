"""Every line of the migration table runs in both libraries. The results are equal."""

import importlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import funcrec as fr
from funcrec.testing import assert_trees_close

pytest.importorskip("torchrec")
import torchrec
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.metrics.metrics_namespace import MetricPrefix
from torchrec.metrics.rec_metric import RecMetricComputation
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.modules.activation import SwishLayerNorm
from torchrec.modules.crossnet import CrossNet, LowRankMixtureCrossNet, VectorCrossNet
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.optim.warmup import WarmupOptimizer

PAGE = (Path(fr.interop.__file__).parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LINES = [line for line in PAGE.splitlines() if line.startswith("| `")]
ROWS = [m.groups() for line in LINES if (m := re.fullmatch(r"\| `([^`]+)` \| `([^`]+)` \|", line))]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def names():
    """Return the names that a row may use: the names that the page's own blocks define."""
    torch.manual_seed(0)
    found = {"__name__": "page"}
    for block in BLOCKS:
        exec(block, found)
    return found


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_page_has_enough_rows():
    """The table has at least sixty lines that are run. The parser skips no line."""
    assert len(ROWS) >= 60 and len(ROWS) == len(LINES)


@pytest.mark.parametrize("row", ROWS, ids=[left[:60] for left, _ in ROWS])
def test_both_sides_are_the_same(row, names, request):
    """TorchRec's call and funcrec's call give the same value."""
    left, right = row
    if "DistributedModelParallel" in left:
        request.getfixturevalue("one_rank")
    theirs, ours = eval(left, names), eval(right, names)
    compare(theirs, ours, names)


def test_a_wrong_line_is_seen(names):
    """A line fails if its two sides differ in an order, a rate, a placement or a number."""
    rate = 'FusedEmbeddingBagCollection(configs, torch.optim.SGD, {"lr": 0.1})'
    plan = 'construct_module_sharding_plan(ebc, {"item": row_wise(), "user": table_wise(rank=1)}, **TWO_RANKS)'
    for left, right in [
        ("kjt.permute([1, 0])", 'ids.permute(["a", "b"])'), (rate, "fr.optim.sgd(lr=0.2)"),
        ("kjt.stride()", "len(ids.keys)"), ("NEMetricComputation(**ONE_TASK)", "fr.metrics.log_loss()"),
        (plan, 'fr.Plan({"item": fr.row_wise("x"), "user": fr.table_wise("x", rank=0)})'),
        ("jt.to_dense()", 'ids["a"].to_lists()'), ("MLP(5, [4, 3])", "fr.nn.mlp((5, 4, 3))"),
    ]:  # fmt: skip
        with pytest.raises(AssertionError):
            compare(eval(left, names), eval(right, names), names)


def test_the_tutorials_calls_exist():
    """The names of TorchRec on the page of its tutorial are names of TorchRec's."""
    page = (Path(fr.__file__).parent / "guide" / "pages" / "torchrec_tutorial.md").read_text()
    prose = re.sub(r"```python.*?```", "", page, flags=re.DOTALL)
    named = {n for code in re.findall(r"`([^`]+)`", prose) for n in re.findall(r"[A-Z]\w+[a-z]\w+|\w+_\w+(?=\()", code)}
    places = [
        "torchrec", "torchrec.distributed", "torchrec.distributed.embeddingbag", "torchrec.distributed.planner",
        "torchrec.distributed.planner.types", "torchrec.distributed.types", "torchrec.inference.modules",
        "torchrec.optim", "torchrec.optim.apply_optimizer_in_backward", "torchrec.optim.rowwise_adagrad",
        "torchrec.sparse.jagged_tensor",
    ]  # fmt: skip
    found = [importlib.import_module(place) for place in places]
    found += [torchrec.KeyedJaggedTensor, torchrec.distributed.planner.EmbeddingShardingPlanner, torch.nn.Module]
    assert len(named) > 10 and {n for n in named if not any(hasattr(x, n) for x in found)} == set()


# -- comparisons -----------------------------------------------------------------------------------------------------


def compare(theirs, ours, names):
    """Compare two values by the kind of funcrec's value. Rules and layers run. All other values are compared
    directly."""
    if isinstance(ours, fr.optim.RowOptimizer):
        assert_trees_close(trained(theirs, names), trained_by(ours, names), **CLOSE)
    elif isinstance(theirs, WarmupOptimizer):
        assert_trees_close([float(ours(torch.tensor(i))) for i in range(5)], rates(theirs), rtol=1e-6)
    elif isinstance(theirs, RecMetricComputation):
        compare_metrics(theirs, ours, names)
    elif isinstance(ours, fr.nn.Layer):
        compare_layers(theirs, ours)
    elif isinstance(ours, fr.models.Model):
        compare_models(theirs, ours, names)
    elif isinstance(ours, fr.Plan):
        assert placements(theirs) == {n: (p.kind, p.ranks) for n, p in dict(ours.placements).items()}
    elif isinstance(theirs, RandomRecDataset):
        assert form_of(next(iter(theirs))) == form_of(next(ours))
    elif isinstance(theirs, Batch):
        parts = theirs.dense_features, theirs.sparse_features, theirs.labels
        assert_trees_close(plain(parts), plain((ours.dense, ours.ids, ours.label)))
    else:
        assert_trees_close(plain(theirs), plain(ours), **CLOSE)


def plain(x):
    """Return the value of either library as lists, tensors and numbers."""
    kinds = (torchrec.KeyedJaggedTensor, torchrec.JaggedTensor, torchrec.KeyedTensor, torchrec.EmbeddingBagConfig,
             torchrec.EmbeddingConfig)  # fmt: skip
    if isinstance(x, kinds):
        x = fr.interop.from_torchrec(x)
    if isinstance(x, fr.KeyedJaggedTensor | fr.JaggedTensor):
        x = x.unpad()
        parts = [plain(getattr(x, n)) for n in ("values", "weights", "offsets")]
        return [*parts, *(plain(getattr(x, n, None)) for n in ("keys", "strides"))]
    if isinstance(x, fr.TableConfig | fr.FeatureConfig):
        return repr(x)
    if isinstance(x, fr.KeyedTensor):
        return [x.values.detach(), list(x.keys), list(x.dims)]
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if hasattr(x, "local_shards"):
        return torch.cat([s.tensor for s in x.local_shards()])
    if isinstance(x, torch.Tensor):
        return [plain(v) for v in x.unbind()] if x.is_nested else plain_tensor(x)
    return [plain(v) for v in x] if isinstance(x, list | tuple) else str(x)


def plain_tensor(x):
    """Return a tensor as strings or in f64. The tensors of a list then equal the numbers of a list."""
    return [str(n) for n in x.tolist()] if x.dim() == 1 and not x.is_floating_point() else x.detach().double()


def data(names):
    return names["kjt"], names["ids"], torch.linspace(-1, 1, 48).reshape(3, 16)


def trained(theirs, names):
    """Return the rows after one step of TorchRec's optimizer. The first rows are those of `params`."""
    kjt, _, d = data(names)
    module = theirs if isinstance(theirs, FusedEmbeddingBagCollection) else names["ebc"]
    names["with_rows"](module)
    if module is theirs:
        (module(kjt).values() * d).sum().backward()
    else:
        theirs.zero_grad()
        (module(kjt).values() * d).sum().backward()
        theirs.step()
    return {k.split(".")[-2]: v.detach() for k, v in module.state_dict().items()}


def trained_by(ours, names):
    _, ids, d = data(names)
    tables, features = names["params"].tables, names["features"]
    acts = fr.lookup(tables, ids, features)
    grads = fr.lookup_transpose(fr.KeyedTensor(d, acts.keys, acts.dims), ids, features, tables)
    return dict(ours.update(grads, ours.init(tables), tables, step=0)[0])


def rates(theirs):
    found = []
    for p in theirs.params.values():
        p.grad = torch.zeros_like(p)
    for _ in range(5):
        found.append(theirs.param_groups[0]["lr"])
        theirs.step()
    return found


def compare_metrics(theirs, ours, names):
    p, y = names["predictions"], names["labels"]
    theirs.update(predictions=p[None], labels=y[None], weights=torch.ones(1, 64, dtype=torch.float64))
    found = [float(r.value) for r in theirs.compute() if r.metric_prefix == MetricPrefix.LIFETIME]
    assert float(ours.compute(ours.update(ours.init(), p, y))) in [pytest.approx(v, abs=1e-9) for v in found]


def compare_layers(theirs, ours):
    """Compare the outputs of a layer. Our parameters are the module's parameters, matched by shape and order."""
    for i, p in enumerate(theirs.parameters()):
        p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    if isinstance(theirs, MLP):
        params = {"linear": [{"weight": m._linear.weight, "bias": m._linear.bias} for m in theirs._mlp]}
    elif isinstance(theirs, SwishLayerNorm):
        params = {"weight": theirs.norm[0].weight, "bias": theirs.norm[0].bias}
    elif isinstance(theirs, VectorCrossNet):
        params = [{"weight": w.T, "bias": b.flatten()} for w, b in zip(theirs.kernels, theirs.bias, strict=True)]
    elif isinstance(theirs, LowRankMixtureCrossNet):
        own = {"u": theirs.U_kernels, "c": theirs.C_kernels, "v": theirs.V_kernels}
        layers = [{k: x[i] for k, x in own.items()} | {"bias": theirs.bias[i].flatten()} for i in range(3)]
        params = {"gate": torch.cat([g.weight for g in theirs.gates]), "layers": layers}
    else:
        own = {"weight": "kernels"} if isinstance(theirs, CrossNet) else {"u": "W_kernels", "v": "V_kernels"}
        params = [
            {**{k: getattr(theirs, n)[i] for k, n in own.items()}, "bias": theirs.bias[i].flatten()} for i in range(3)
        ]
    like = ours.init(fr.key(0))
    assert fr.tree.structure(params) == fr.tree.structure(like)
    x = torch.linspace(-1, 1, 20).reshape(4, 5)
    assert_trees_close(ours.apply(params, x).detach(), theirs(x).detach(), **CLOSE)


def compare_models(theirs, ours, names):
    """Load our model from the state dict of the module, and compare the predictions."""
    params = fr.interop.load_torchrec_state_dict(ours.init(fr.key(0)), theirs.state_dict())
    dense = torch.linspace(-1, 1, 9).reshape(3, 3)
    logits = ours.apply(params, fr.Batch(names["ids"], None, dense))
    want = theirs(dense, names["kjt"]).squeeze(1).detach()
    assert_trees_close(logits.sigmoid() if isinstance(theirs, SimpleDeepFMNN) else logits, want, **CLOSE)


KINDS = {"data_parallel": "replicated"}


def placements(plan):
    ranks = lambda p: () if p.sharding_type in ("row_wise", "data_parallel") else tuple(p.ranks)
    return {n: (KINDS.get(p.sharding_type, p.sharding_type), ranks(p)) for n, p in plan.items()}


def form_of(batch):
    """Return the form that two random batches share: keys, bags, ids per bag, dense inputs."""
    ids = batch.sparse_features if hasattr(batch, "sparse_features") else batch.ids
    ids = fr.interop.from_torchrec(ids) if not isinstance(ids, fr.KeyedJaggedTensor) else ids
    dense = batch.dense_features if hasattr(batch, "dense_features") else batch.dense
    label = batch.labels if hasattr(batch, "labels") else batch.label
    assert 0 <= int(ids.values.min()) <= int(ids.values.max()) < 10
    return ids.keys, ids.num_bags, set(ids.lengths.tolist()), dense.shape, label.shape
