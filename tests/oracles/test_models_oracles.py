"""The MovieLens-1M models equal plain torch.nn modules with the same weights, in f64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as torch_tree

import funcrec as fr
from funcrec import models

SIZES = (6041, 3884, 8, 3, 22, 82)
FIELDS = ("user_id", "item_id", "age", "gender", "occupation", "release_year")
NAMES = ("lr", "fm", "dlrm", "widedeep", "deepfm", "dcnv2")
B = 9


class Net(torch.nn.Module):
    """The context-aware models of RecBole over padded ids: six single ids T[B, 6], and genres G[B, 6] with 0 for
    none."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.emb, self.gemb = torch.nn.Embedding(10_040, 16), torch.nn.Embedding(19, 16)
        self.lin, self.glin = torch.nn.Embedding(10_040, 1), torch.nn.Embedding(19, 1)
        self.bias = torch.nn.Parameter(torch.zeros(1))
        if kind == "dcnv2":
            self.cross = torch.nn.ModuleList([torch.nn.Linear(112, 112) for _ in range(2)])
        width, layers = 112 + (21 if kind == "dlrm" else 0), []
        for size in (256,) * (2 if kind == "dcnv2" else 3):
            norm = [torch.nn.BatchNorm1d(size)] if kind == "dcnv2" else []
            layers += [torch.nn.Linear(width, size), *norm, torch.nn.ReLU()]
            width = size
        self.mlp, self.out = torch.nn.Sequential(*layers), torch.nn.Linear(256, 1)

    def mean(self, table, genres):
        there = (genres != 0).unsqueeze(-1)
        return (table(genres) * there).sum(1) / there.sum(1).clamp(min=1)

    def forward(self, ids, genres):
        first = self.lin(ids).sum(1) + self.mean(self.glin, genres) + self.bias
        e = torch.cat([self.emb(ids), self.mean(self.gemb, genres).unsqueeze(1)], 1)
        pairs = sum((e[:, i] * e[:, j]).sum(1, keepdim=True) for i in range(7) for j in range(i))
        x = e.flatten(1)
        deep = lambda x: self.out(self.mlp(x))
        if self.kind == "dcnv2":
            z = x
            for layer in self.cross:
                z = x * layer(z) + z
            return deep(z).squeeze(1)
        if self.kind == "dlrm":
            dots = [(e[:, i] * e[:, j]).sum(1) for i in range(7) for j in range(i)]
            return deep(torch.cat([x, torch.stack(dots, 1)], 1)).squeeze(1)
        terms = {"lr": (), "fm": (pairs,), "widedeep": (deep(x),), "deepfm": (pairs, deep(x))}[self.kind]
        return (first + sum(terms)).squeeze(1)

    def params(self) -> fr.Params:
        """Return the weights of this module as funcrec's parameters. The leaves are the module's own tensors."""
        tables = {
            "fields": self.emb.weight, "genre": self.gemb.weight,
            "fields_linear": self.lin.weight, "genre_linear": self.glin.weight,
        }  # fmt: skip
        linear = lambda m: {"weight": m.weight, "bias": m.bias}
        dense = {"bias": self.bias}
        if self.kind in ("lr", "fm"):
            return fr.Params(tables, dense)
        norms = [m for m in self.mlp if isinstance(m, torch.nn.BatchNorm1d)]
        dense |= {"mlp": {"linear": [linear(m) for m in self.mlp if isinstance(m, torch.nn.Linear)]}}
        dense |= {"out": linear(self.out)}
        if self.kind == "dcnv2":
            dense |= {"cross": [linear(m) for m in self.cross]}
            dense["mlp"]["norm"] = [{"scale": m.weight, "shift": m.bias} for m in norms]
            dense["stats"] = [{"mean": m.running_mean, "var": m.running_var} for m in norms]
        return fr.Params(tables, dense)


def generated(seed=0):
    """Return ids that are offset into one table, and bags of 0 to 6 genres with garbage after them."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.tensor((0, *SIZES[:-1])).cumsum(0)
    ids = torch.stack([torch.randint(1, n, (B,), generator=draw) for n in SIZES], 1) + starts
    lengths = torch.tensor([0, 1, 6, 2, 0, 3, 1, 4, 0])
    bags = [torch.randint(1, 19, (int(n),), generator=draw) for n in lengths]
    genres = torch.stack([F.pad(bag, (0, 6 - len(bag))) for bag in bags])
    values = torch.cat([ids.T.flatten(), *bags, torch.full((5,), -(10**12))])
    offsets = torch.cat([torch.arange(6 * B + 1), 6 * B + lengths.cumsum(0)])
    keyed = fr.KeyedJaggedTensor.from_offsets((*FIELDS, "genre"), values, offsets)
    label = torch.randint(0, 2, (B,), generator=draw).double()
    return ids, genres, fr.Batch(keyed, label)


def make_net(kind):
    torch.manual_seed(1)
    net = Net(kind).double()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return net


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_reference_logits(name):
    """Evaluation gives the logits of the plain module with the same weights, even for bags without genres."""
    net, model = make_net(name), models.ml1m(name)
    ids, genres, batch = generated()
    # the statistics differ from the initial statistics
    if name == "dcnv2":
        net.train()(*generated(seed=1)[:2])
    expected = net.eval()(ids, genres)
    params = net.params()
    fresh = model.init(fr.key(0))
    assert {k: v.shape for k, v in fresh.tables.items()} == {k: v.shape for k, v in params.tables.items()}
    shapes = lambda tree: torch_tree.tree_map(lambda x: tuple(x.shape), tree)
    assert shapes(fresh.dense) == shapes(params.dense)
    torch.testing.assert_close(model.apply(params, batch), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_reference_gradients(name):
    """value_and_grad of the cross entropy in evaluation gives the gradients of the plain module, for tables and dense
    parameters."""
    net, model = make_net(name), models.ml1m(name)
    ids, genres, batch = generated()
    net.eval()
    F.binary_cross_entropy_with_logits(net(ids, genres), batch.label).backward()

    def loss_fn(params, batch):
        return F.binary_cross_entropy_with_logits(model.apply(params, batch), batch.label)

    params = net.params()
    plain = fr.Params(*torch_tree.tree_map(lambda x: x.detach(), (params.tables, params.dense)))
    _, grads = fr.value_and_grad(loss_fn)(plain, batch)
    wanted = lambda p: torch.zeros_like(p) if p.grad is None else p.grad
    for table, p in params.tables.items():
        got = grads.tables[table].to_dense()
        torch.testing.assert_close(got, wanted(p), rtol=1e-6, atol=1e-8, check_dtype=False)
    trained = lambda d: {k: v for k, v in d.items() if k != "stats"}
    expected = torch_tree.tree_map(wanted, trained(params.dense))
    torch_tree.tree_map(torch.testing.assert_close, trained(grads.dense), expected)


def test_training_statistics_are_the_reference_statistics():
    """The running statistics of dcnv2 after a training batch without dropout equal those of BatchNorm1d."""
    net = make_net("dcnv2")
    ids, genres, batch = generated()
    params = torch_tree.tree_map(lambda x: x.detach().clone(), net.params())
    model = models.dcnv2(
        models.ml1m("dcnv2").tables, models.ml1m("dcnv2").features, num_cross=2, sizes=(256, 256), batch_norm=True
    )
    logits, stats = model.train_apply(params, batch, fr.key(0))
    expected = net.train()(ids, genres)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    torch_tree.tree_map(
        lambda a, b: torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6), stats, net.params().dense["stats"]
    )


def test_tables_are_drawn_as_the_protocol_says():
    """Every table is drawn xavier-normal, with deviation sqrt(2 / (rows + dim)), 0.0141 for the embeddings. Biases are
    zero."""
    params = models.ml1m("deepfm").init(fr.key(0))
    for table in params.tables.values():
        expected = (2 / (table.shape[0] + table.shape[1])) ** 0.5
        assert abs(float(table.std()) / expected - 1) < 5 / (2 * table.numel()) ** 0.5
    assert float(params.dense["bias"].abs().sum()) == 0
    assert all(float(x["bias"].abs().sum()) == 0 for x in params.dense["mlp"]["linear"])
    matrix = params.dense["mlp"]["linear"][1]["weight"]
    assert abs(float(matrix.std()) / (2 / 512) ** 0.5 - 1) < 0.02
    crosses = models.ml1m("dcnv2").init(fr.key(0)).dense["cross"]
    assert all(abs(float(x["weight"].std()) - 1) < 0.05 for x in crosses)
