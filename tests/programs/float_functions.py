"""Every public function that takes float tensors, as a case of the sweep `differences`.

Shapes: R rows, D dim, N ids, B bags."""

import torch
from funcrec.kernels import library, ops
from funcrec.kernels.forms import Feature, Segment, Terms

import funcrec as fr
from funcrec.testing._modes import Case, draw

F64 = torch.float64
ROWS = torch.tensor([2, 0, 2, -1, 3, 0])  # repeated rows and one padding row
CLICKS = (
    fr.FeatureConfig("sum", table="t", weighted=True, column="clicks"),
    fr.FeatureConfig("mean", table="t", pooling="mean", max_length=2, column="clicks"),
    fr.FeatureConfig("list", table="t", pooling="none", weighted=True, column="clicks"),
)
MAXIMA = (fr.FeatureConfig("max", table="t", pooling="max", weighted=True, column="clicks"), CLICKS[0])
LENGTHS = torch.tensor([2, 0, 3])
OFFSETS = torch.tensor([0, 2, 2, 5])
FILLED = torch.tensor([0, 2])  # the bags that are not empty
ADAM, SGD = torch.optim.Adam, torch.optim.SGD


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=F64)


def ids(weights: torch.Tensor) -> fr.KeyedJaggedTensor:
    """Return bags of 2, 0 and 3 ids, and one place of padding."""
    return fr.KeyedJaggedTensor.from_offsets(["clicks"], ROWS.clamp(min=0), OFFSETS, weights=weights)


def shared(weights: torch.Tensor) -> fr.KeyedJaggedTensor:
    """Return the bags of `ids` as those of four examples, two of which share a bag."""
    inverse = torch.tensor([[2, 0, 1, 2]])
    return fr.KeyedJaggedTensor(ROWS.clamp(min=0), OFFSETS, weights, inverse, ("clicks",))


def two_keys(weights: torch.Tensor) -> fr.KeyedJaggedTensor:
    return fr.KeyedJaggedTensor.from_lengths(["a", "b"], torch.arange(6), torch.tensor([2, 0, 1, 3]), weights=weights)


def row_grads(grads: torch.Tensor) -> fr.RowGrads:
    return fr.RowGrads.from_entries(ROWS, grads, num_embeddings=5)


TABLE, GRADS, WEIGHTS, VALUES = (
    draw("table", (5, 3)),
    draw("grads", (6, 3)),
    draw("weights", (6,)),
    draw("values", (6, 2)),
)


# -- kernels -------------------------------------------------------------------------------------------------------

POOLED = [Feature(0, 0, 0, 0, False, True, 0), Feature(0, 0, 0, 2, True, False, 3)]
SEGMENTS = [Segment(0, 0, 0, 0, 0, 0, 3, 0, True, 0), Segment(0, 0, 3, 0, 0, 0, 3, 2, False, -1)]
D_OUT = draw("d_out", (3, 6))
COUNT = torch.tensor(2)
TAKEN = torch.tensor([3, 1, 4])


def terms(d, weights) -> Terms:
    return Terms([d], [ROWS], [OFFSETS], [weights], SEGMENTS)


OPERATIONS = {  # {name: (f of the implementation, inputs)}
    "pooled_lookup": (
        lambda how: lambda table,
        weights: ops.pooled_lookup([table], [ROWS], OFFSETS, weights, POOLED, 3, implementation=how),
        {"table": TABLE, "weights": WEIGHTS},
    ),
    "pooled_lookup_weights": (
        lambda how: lambda d, table,
        weights: ops.pooled_lookup_weights(d, [table], [ROWS], OFFSETS, weights, POOLED, implementation=how),
        {"d": D_OUT, "table": TABLE, "weights": WEIGHTS},
    ),
    "expand": (
        lambda how: lambda d, weights: ops.expand(terms(d, weights), [(5, 3)], implementation=how),
        {"d": D_OUT, "weights": WEIGHTS},
    ),
    "coalesce": (
        lambda how: lambda d, weights: ops.coalesce(terms(d, weights), [(5, 3)], implementation=how),
        {"d": D_OUT, "weights": WEIGHTS},
    ),
    "fused_update": (
        lambda how: lambda table, slot, d, weights, lr: ops.fused_update(
            [table], [[slot.square()]], terms(d, weights), lr, torch.tensor(0), None, "adagrad", [0.1, 0.0],
            implementation=how
        ),
        {"table": TABLE, "slot": draw("slot", (5, 3)), "d": D_OUT, "weights": WEIGHTS, "lr": number(0.1)},
    ),
    "gather_rows": (lambda how: lambda table: ops.gather_rows(table, ROWS, implementation=how), {"table": TABLE}),
    "scatter_rows": (
        lambda how: lambda table, new: ops.scatter_rows(table, TAKEN, COUNT, new, implementation=how),
        {"table": TABLE, "new": draw("new", (3, 3))},
    ),
    "take_ranges": (
        lambda how: lambda values: ops.take_ranges(values, TAKEN, torch.tensor([2, 3, 1]), 7, implementation=how)[0],
        {"values": VALUES},
    ),
    "take_ranges_transpose": (
        lambda how: lambda d: ops.take_ranges_transpose(d, TAKEN, torch.tensor([2, 3, 1]), 6, implementation=how),
        {"d": VALUES},
    ),
    "to_padded": (lambda how: lambda values: ops.to_padded(values, OFFSETS, 2, 7.0, implementation=how),
        {"values": VALUES}),
    "from_padded": (
        lambda how: lambda padded: ops.from_padded(padded, OFFSETS, 6, implementation=how),
        {"padded": draw("padded", (3, 2, 2))},
    ),
    "bucketize": (lambda how: lambda weights: ops.bucketize(ROWS, OFFSETS, weights, 2, 3, implementation=how),
        {"weights": WEIGHTS}),
    "top_k": (
        lambda how: lambda table, queries: ops.top_k(queries, table, None, None, 2, implementation=how)[0],
        {"table": TABLE, "queries": draw("queries", (2, 3))},
    ),
    "jagged_attention": (
        lambda how: lambda q, k, position, time: ops.jagged_attention(
            q, k, k.sin(), OFFSETS, OFFSETS, position, time, ROWS, ROWS * 3, None, 0.5, 1.0, True, True,
            implementation=how,
        )[0],
        {"q": draw("q", (6, 1, 3)), "k": draw("k", (6, 1, 3)), "position": draw("p", (1, 2)),
            "time": draw("t", (1, 3))},
    ),
    "jagged_attention_transpose": (
        lambda how: lambda d, q, k: ops.jagged_attention_transpose(
            d, draw("out", (6, 1, 3)), draw("logs", (0, 1)), q, k, k, OFFSETS, OFFSETS, *[None] * 5, 0.5, 2.0, False,
            True, implementation=how,
        )[:3],
        {"d": draw("d", (6, 1, 3)), "q": draw("q", (6, 1, 3)), "k": draw("k", (6, 1, 3))},
    ),
}  # fmt: skip


def of_kernels() -> list[Case]:
    """Return the kernels' cases. A call without a chosen implementation, or with the reference, is right. Named kernels
    and their operators, called directly, raise."""
    found = []
    for name, (make, inputs) in OPERATIONS.items():
        known = "*" if name == "fused_update" else ()
        found += [Case(f"ops.{name}", make(None), inputs, known)]
        if not known:
            found += [Case(f"ops.{name} reference", make("reference"), inputs)]
        found += [Case(f"ops.{name} cpp", make("cpp"), inputs, "*")]
    operator = library.operator("cpp", "gather_rows")
    return [
        *found,
        Case("torch.ops.funcrec_cpp.gather_rows", lambda table: operator(table, ROWS), {"table": TABLE}, "*"),
    ]


# -- lookups and row gradients -------------------------------------------------------------------------------------


def bent(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + 0.05 * x.square()


def loss_fn(params, batch):
    pooled = fr.lookup(params.tables, batch, CLICKS).values.flatten(1)
    listed = fr.lookup_sequence(params.tables, batch, CLICKS)["list"].to_padded(3)
    return bent(pooled @ params.dense["w"]).sum() + bent(listed.sum(1) * params.dense["b"]).sum()


DENSE = {"w": draw("w", (6,)), "b": draw("b", (3,))}


def gradients(table, w, b, weights):
    loss, grads = fr.value_and_grad(loss_fn)(fr.Params({"t": table}, {"w": w, "b": b}), ids(weights))
    return loss, grads.tables["t"].to_dense(), grads.dense


def of_examples(table, w, b, weights):
    """Return what is computed from the gradients of three examples, and private gradients of them."""
    params, own = fr.Params({"t": table}, {"w": w, "b": b}), ids(weights)
    losses, grads = fr.per_example_grads(loss_fn)(params, own)
    total = fr.sum_examples(grads, losses)
    private = fr.private_grads(loss_fn, max_norm=0.3, noise_multiplier=0.1)(params, own, key=fr.key(0))[1]
    dense = [x for g in (total, private) for x in (g.tables["t"].to_dense(), g.dense)]
    numbers = fr.example_norms(grads), fr.example_dots(grads, total), fr.gradient_noise_scale(grads)
    return losses, dense, numbers


def products(table, w, b, weights):
    """Return the products of the parameters with the Hessian, Gauss-Newton's matrix and Fisher's."""
    params, own = fr.Params({"t": table}, {"w": w, "b": b}), ids(weights)
    predict = lambda p, own: fr.lookup(p.tables, own, CLICKS).values @ p.dense["w"]
    makers = fr.hvp(loss_fn), fr.gauss_newton_product(predict, lambda y, own: bent(y).sum()), fr.fisher_product(predict)
    made = [multiply(params, params, own) for multiply in makers]
    return [(x.tables["t"].to_dense(), x.dense) for x in made]


def solved(b, x):
    """Return conjugate gradients' solution for a positive matrix, and eigenvalues of two steps of Lanczos."""
    product = lambda v: 2 * v + x * (x @ v)
    found = fr.lanczos(product, b, steps=2, key=fr.key(1))
    return fr.conjugate_gradient(product, b, steps=2).x, found.values


LOOKED = {"table": TABLE, "weights": WEIGHTS}
LOSS = {"table": TABLE, **DENSE, "weights": WEIGHTS}


def transposed(d, weights):
    d_acts = fr.KeyedTensor(d, ("sum", "mean"), (3, 3))
    return fr.lookup_transpose(d_acts, ids(weights), CLICKS, [fr.TableConfig("t", 5, 3)])["t"].coalesce().grads


def sequence_transposed(d, weights):
    lists = {"list": fr.JaggedTensor(d, OFFSETS)}
    return fr.lookup_sequence_transpose(lists, ids(weights), CLICKS, [fr.TableConfig("t", 5, 3)])["t"].to_dense()


def both(grads, other):
    return {"t": row_grads(grads), "u": row_grads(other)}


TWO = {"grads": GRADS, "other": draw("other", (6, 3))}
ROW_GRADS = {
    "RowGrads.to_dense": lambda g: g.to_dense(),
    "RowGrads.coalesce": lambda g: (g.coalesce().grads, g.coalesce(implementation="reference").to_dense()),
    "RowGrads.clip": lambda g: g.clip(0.7).to_dense(),
    "RowGrads.norm": lambda g: (g.norm(), g.squared_norm()),
    "RowGrads.where": lambda g: g.where(torch.tensor(True)).grads,
}


def again(table, w, b, weights):
    """Return a loss that is computed again, its gradients, and a layer that closes over its parameters."""
    loss, params = fr.remat(loss_fn), fr.Params({"t": table}, {"w": w, "b": b})
    value, grads = fr.value_and_grad(loss)(params, ids(weights))
    layer = fr.remat(lambda x: torch.tanh(x * b) * w.sum())
    return value, grads.tables["t"].to_dense(), grads.dense, layer(table)


def of_lookups() -> list[Case]:
    return [
        Case("lookup", lambda table, weights: fr.lookup({"t": table}, ids(weights), CLICKS).values, LOOKED),
        Case("lookup of maxima", lambda table, weights: fr.lookup({"t": table}, ids(weights), MAXIMA).values, LOOKED),
        Case("lookup_each", lambda table, weights: fr.lookup_each({"t": table}, ids(weights), CLICKS), LOOKED),
        Case("lookup of shared bags",
            lambda table, weights: fr.lookup({"t": table}, shared(weights), CLICKS).values, LOOKED),
        Case("lookup_sequence", lambda table,
            weights: fr.lookup_sequence({"t": table}, ids(weights), CLICKS)["list"].values, LOOKED),
        Case("lookup_transpose", transposed, {"d": D_OUT, "weights": WEIGHTS}),
        Case("lookup_sequence_transpose", sequence_transposed, {"d": draw("lists", (6, 3)), "weights": WEIGHTS}),
        Case("value_and_grad", gradients, LOSS),
        Case("per_example_grads", of_examples, LOSS),
        Case("of_rows", lambda table, w, b, weights: (lambda of: of.fn(of.params))(
            fr.of_rows(loss_fn, fr.Params({"t": table}, {"w": w, "b": b}), ids(weights))), LOSS),
        Case("remat", again, LOSS),
        Case("invariant", fr.invariant(lambda table, b: torch.tanh(table * b).sum(1)),
            {"table": TABLE, "b": DENSE["b"]}, "*"),
        Case("hvp", products, LOSS, "*"),  # torch nests no forward_ad levels
        Case("conjugate_gradient", solved, {"b": draw("right", (4,)), "x": draw("left", (4,))}),
        Case("checked", fr.checked(lambda table, weights: fr.lookup({"t": table}, ids(weights), CLICKS[:1]).values),
            LOOKED, "*"),
        *(Case(n, lambda grads, f=f: f(row_grads(grads)), {"grads": GRADS}) for n, f in ROW_GRADS.items()),
        Case("RowGrads.scale", lambda grads, by: row_grads(grads).scale(by).to_dense(),
            {"grads": GRADS, "by": number(0.7)}),
        Case("RowGrads.__add__", lambda grads, other: (row_grads(grads) + row_grads(other)).coalesce().grads, TWO),
        Case("global_norm", lambda grads, other: fr.global_norm(both(grads, other), other), TWO),
        Case("clip_by_global_norm",
            lambda **xs: [g.to_dense() for g in fr.clip_by_global_norm(both(**xs), 0.5).values()], TWO),
    ]  # fmt: skip


# -- jagged values -------------------------------------------------------------------------------------------------


def jagged(values) -> fr.JaggedTensor:
    return fr.JaggedTensor.from_offsets(values, OFFSETS, weights=values[:, 0])


def attended(**settings):
    """Return the attention of the bags of 2, 0 and 3 positions, whose keys and values have one more position each."""
    times = {"query_times": torch.arange(6) * 7, "key_times": torch.arange(9) * 5}

    def f(queries, keys, values, position_bias, time_bias):
        bags = fr.JaggedTensor(queries, OFFSETS), fr.JaggedTensor(keys, torch.tensor([0, 3, 4, 8]))
        biases = {"position_bias": position_bias, "time_bias": time_bias}
        return fr.jagged_attention(*bags, values, **biases, **times, **settings)

    return f


ATTENTION = {
    "queries": draw("attention queries", (6, 2, 3)),
    "keys": draw("attention keys", (9, 2, 3)),
    "values": draw("attention values", (9, 2, 2)),
    "position_bias": draw("position_bias", (2, 4)),
    "time_bias": draw("time_bias", (1, 9)),
}
ATTENDED = {
    "jagged_attention": attended(),
    "jagged_attention(silu)": attended(activation="silu", normalizer=3.0, num_targets=torch.tensor([1, 0, 2])),
}
JAGGED = {
    "JaggedTensor.to_padded": lambda values: jagged(values).to_padded(2, fill=3.0),
    "JaggedTensor.select": lambda values: jagged(values).select(torch.tensor([2, 0]), capacity=6),
    "JaggedTensor.pad_to": lambda values: jagged(values).pad_to(8),
    "JaggedTensor.unpad": lambda values: jagged(values).unpad(),
    "JaggedTensor.from_lists": lambda values: fr.JaggedTensor.from_lists([list(values[:2]), [], list(values[2:])]),
    "JaggedTensor.from_padded": lambda values: fr.JaggedTensor.from_padded(values.view(2, 3, 2), torch.tensor([2, 3])),
    "bag_filter": lambda values: fr.bag_filter(jagged(values), torch.tensor([True, False, True, True, True, True])),
    "crop": lambda values: fr.data.crop(fr.JaggedTensor(values, OFFSETS), fr.key(0)),
    "reorder": lambda values: fr.data.reorder(fr.JaggedTensor(values, OFFSETS), fr.key(0)),
    "bag_softmax": lambda values: fr.bag_softmax(fr.JaggedTensor(values, OFFSETS)),
    **{
        f"bag_reduce({how})": lambda values, how=how: fr.bag_reduce(fr.JaggedTensor(values, OFFSETS), how)[FILLED]
        for how in ("sum", "mean", "max", "min", "prod", "logsumexp")
    },
    "JaggedTensor.from_lengths": lambda values: fr.JaggedTensor.from_lengths(values[:5], LENGTHS),
}
KEYED = {
    "KeyedJaggedTensor.permute": lambda x: x.permute(["b", "a"]),
    "KeyedJaggedTensor.split": lambda x: x.split([1, 1]),
    "KeyedJaggedTensor.concat": lambda x: fr.KeyedJaggedTensor.concat(x.split([1, 1])[::-1]),
    "KeyedJaggedTensor.from_jagged": lambda x: fr.KeyedJaggedTensor.from_jagged(x.to_dict()),
    "KeyedJaggedTensor.to_dict": lambda x: x["b"],
    "KeyedJaggedTensor.pad_to": lambda x: x.pad_to(9),
    "KeyedJaggedTensor.unpad": lambda x: x.unpad(),
    "KeyedJaggedTensor.concat of one without weights": lambda x: fr.KeyedJaggedTensor.concat(
        [x, fr.KeyedJaggedTensor.from_lists({"c": [[1], [2, 3]]})]
    ),
    "KeyedJaggedTensor.from_lists of some": lambda x: fr.KeyedJaggedTensor.from_lists(
        {"c": [[torch.tensor(1)], []], "a": [x.values, x.values]}, weights={"a": [x.weights, 2 * x.weights]}
    ),
    "KeyedJaggedTensor.to": lambda x: x.to("cpu", F64),
    "KeyedJaggedTensor[bags]": lambda x: x[1:2],
    "pad_to_bucket": lambda x: fr.pad_to_bucket(x),
    "dedup_bags": lambda x: fr.dedup_bags(x),
    "validate": lambda x: fr.validate(x, [fr.FeatureConfig("a", "t", weighted=True)], [fr.TableConfig("t", 9, 1)]),
}


def parts(x) -> dict[str, torch.Tensor]:
    return {"a": x[:, :1], "b": x[:, 1:]}


def regrouped(values):
    return fr.regroup(
        [fr.KeyedTensor.from_dict(parts(values)), fr.KeyedTensor.from_dict({"c": values})], [["c", "a"], ["b"]]
    )


def predicted(w):
    """Return the probabilities of a model with one factor, from the given rows."""
    encoding = fr.data.fit_encoding({"item": ["tea", "jam"]}, fr.data.Schema(categorical=("item",)))
    model = fr.models.lr(*fr.data.configs(encoding, 1))
    model = model._replace(apply=lambda params, batch: batch.ids.values * params.dense)
    return fr.predict(model, fr.Params({}, w), encoding, {"item": ["jam", "tea", "jam"]}, batch_size=2)


def of_values() -> list[Case]:
    host = {
        "JaggedTensor.unpad",
        "KeyedJaggedTensor.unpad",
        "validate",
        "pad_to_bucket",
        "dedup_bags",
    }  # these functions read lengths on the host
    return [
        *(Case(n, f, {"values": VALUES}, "*" if n in host else ()) for n, f in JAGGED.items()),
        *(Case(n, f, ATTENTION) for n, f in ATTENDED.items()),
        *(Case(n, lambda w, f=f: f(two_keys(w)), {"w": WEIGHTS}, "*" if n in host else ()) for n, f in KEYED.items()),
        Case("KeyedTensor.from_dict", lambda values: fr.KeyedTensor.from_dict(parts(values))["b"], {"values": VALUES}),
        Case("KeyedTensor.concat",
            lambda values: fr.KeyedTensor.concat([fr.KeyedTensor.from_dict({k: x}) for k,
                    x in parts(values).items()]).stack(), {"values": VALUES}),
        Case("regroup", regrouped, {"values": VALUES}),
        Case("top_k", lambda queries, table: fr.top_k(queries, table, 2)[0],
            {"queries": draw("queries", (2, 3)), "table": TABLE}),
        Case("build_index", lambda items: fr.search_index(fr.build_index(items), torch.ones(2, 3), 2)[0],
            {"items": TABLE}, "*"),
        Case("search_index", lambda queries: fr.search_index(fr.build_index(torch.eye(3)), queries, 2)[0],
            {"queries": draw("queries", (2, 3))}, "*"),
        Case("predict", predicted, {"w": draw("w", (1,))}),
        Case("copy", lambda x: fr.copy({"x": x})["x"], {"x": GRADS}),
        Case("member", lambda x: fr.member({"x": x}, 1)["x"], {"x": GRADS}),
        Case("tree.map", lambda x: fr.tree.map(lambda y, z: y * z, {"x": x}, {"x": x})["x"], {"x": GRADS}),
        Case("Batch", lambda values, w: fr.Batch(two_keys(w), values[:, 0], values), {"values": VALUES, "w": WEIGHTS}),
    ]  # fmt: skip
