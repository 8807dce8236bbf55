"""Float tables that lookups read as if they were quantised. They stay floats while they are trained.

    acts = lookup(dequantize(quantize(tables)))        d_tables = lookupᵀ(d_acts), straight through the rounding

A lookup rounds a copy of the rows that ids name. It changes no table. A learned scale s of a row gives the rounded
numbers x̂, and s has the gradient d_s:

    x̂ = s · clip(round(x / s), -n, p)      d_s = g · Σ_j d_j · (round(x_j / s) - x_j / s; -n below the range; p above)

with n = 2^(bits - 1), p = n - 1, g = 1 / √(D · p). Inside the range d_x = d, outside it d_x = 0.
Shapes: N ids, R rows, D dim.

Source: Bengio, Léonard, Courville (arXiv:1308.3432) for the straight-through gradient; Esser et al., "Learned step size
quantization" (ICLR 2020, arXiv:1902.08153), equations 1 to 3 and section 2.2.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from funcrec.core import (
    Key,
    Movable,
    Named,
    Problem,
    any_tracked,
    check,
    describe,
    fail,
    is_forward,
    mapping,
    pytree,
    replace,
    sure,
    typed,
)
from funcrec.jagged import KeyedJaggedTensor
from funcrec.kernels.forms import Feature
from funcrec.kinds._codes import CODES, Dtype, dtype_problems, named_dtypes
from funcrec.kinds._quantized import QuantizedTables, quantize
from funcrec.kinds._rounding import ByScale, as_stored, by_scale, first_scales, learned_codes, refuse_learned, row_keys
from funcrec.tables import (
    KINDS,
    FeatureConfig,
    Kind,
    LookupResult,
    RowGrads,
    TableRef,
    gather_rows,
    is_plain,
    kind_of_tables,
    pooled_lookup,
    pooled_read,
    sequence_rows,
    sequences_read,
    table_shapes,
    tensor_problems,
)

SCALE = ".scale"  # suffix of the part that holds a table's scales


@mapping(lambda fake: parts_of(fake), "part")
@pytree(static=("dtypes",), optional=("rounding",))
class FakeQuantizedTables(Named[Any], Movable):
    """Float tables that are read as codes. `fake_quantize` returns them.

    Optimizers update its parts: the tables and, if scales are learned, `scales`.

    Args:
      tables: {table: f[R, D]}; or ShardedTables, inside a mapped function.
      scales: {table + ".scale": f[R, 1]} for tables with learned scales; {} without learned scales.
      dtypes: (table, dtype) of each table, in order.
      rounding: the key that rounds codes at random, i64[]; None rounds to the nearest code.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.fake_quantize({"item": torch.ones(3, 2)}, "int4", scales="learned")
      FakeQuantizedTables({item: int4 of f32[3, 2], item.scale: f32[3, 1]})
    """

    tables: dict[str, Tensor]
    scales: dict[str, Tensor]
    dtypes: tuple[tuple[str, str], ...]
    rounding: Tensor | None = None

    def __post_init__(self) -> None:
        check("funcrec.FakeQuantizedTables", part_problems(self.tables, self.scales, self.dtypes))

    def __repr__(self) -> str:
        dtypes = {n: f"{dtype} of " for n, dtype in self.dtypes}
        each = (f"{n}: {dtypes.get(n, '')}{describe(t)}" for n, t in self.items())
        return f"FakeQuantizedTables({{{', '.join(each)}}})"


def parts_of(tables: FakeQuantizedTables) -> dict[str, Tensor]:
    return {**tables.tables, **tables.scales}


@typed
def fake_quantize(
    tables: Mapping[str, Any],
    dtype: Dtype | Mapping[str, Dtype] = "int8",
    *,
    scales: Literal["row", "learned"] = "row",
    key: Key | None = None,
) -> FakeQuantizedTables:
    """Return tables f[R, D] that lookups read as if quantised, for quantisation-aware training.

    Gradients go straight through the rounding. `quantize` of the trained tables gives the numbers that training saw.

    Call it inside a loss, `fr.lookup(fr.fake_quantize(params.tables, "int4"), ids, features)`. The state then has plain
    tables, or sharded tables whose owners round the rows before they send them. Or store the result of `fake_quantize`
    in the state. Then learned scales are parts of the state, which row optimizers train.

    Args:
      dtype: one dtype for all tables, or {table: dtype}, as in `quantize`; "float32" leaves a table as it is.
      scales: "row" computes the scale of each row from its least and greatest number, as `quantize` does. "learned"
        adds a part {table + ".scale"} of R rows and one column, for codes around 0 of 8, 4 or 2 bits. Learned scales
        begin at 2 · mean|x| / √p. A scale below 2⁻¹⁴ counts as 2⁻¹⁴.
      key: rounds at random, as `quantize(tables, dtype, key=key)` does. Pass another key in each step:
        `fold_in(key, step)`. On a mesh the owner of the rows rounds by its key, so pass the same key on every rank.

    Raises:
      TypeError, ValueError: tables are not floats; or `tables` are sharded and scales are learned; or tables cut by
        columns have a dtype of codes (a row has one scale).

    Law: lookups have the same bits as lookups of quantize(tables, dtype, key=key). Gradients are those of float tables
      that hold the rounded numbers. All derivatives treat the rounding as the identity. Learned scales have gradients
      in `value_and_grad` only. Other derivatives raise a TypeError.

    Cost: it rounds min(N, B · max_length) rows for each feature.

    Example:
      >>> import torch, funcrec as fr
      >>> clicked = fr.FeatureConfig("clicked", table="item")
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1]]})
      >>> loss = lambda p, ids: fr.lookup(fr.fake_quantize(p.tables, "int2"), ids, [clicked]).values.square().sum()
      >>> tables = {"item": torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.2, 3.0]])}
      >>> value, grads = fr.value_and_grad(loss)(fr.Params(tables, {}), ids)
      >>> value, grads.tables["item"].to_dense()[1]
      (tensor(13.), tensor([0., 4., 6.]))

    Source: see `funcrec.quantize`; Esser et al., arXiv:1902.08153, for learned scales.
    """
    call = "funcrec.fake_quantize"
    check(call, fake_problems(tables))
    names = names_of(tables)
    check(call, dtype_problems(names, dtype))
    dtypes = named_dtypes(names, dtype)
    if kind_of_tables(tables).faked:
        check(call, faked_problems(tables, dtypes, scales))
        return FakeQuantizedTables(cast(Any, tables), {}, tuple(dtypes.items()), key)  # of a kind that is no dict
    if scales == "row":
        return FakeQuantizedTables(dict(tables), {}, tuple(dtypes.items()), key)
    check(call, learned_problems(tables, key))
    first = {n + SCALE: first_scales(tables[n], CODES[own]) for n, own in dtypes.items() if own in CODES}
    return FakeQuantizedTables(dict(tables), first, tuple(dtypes.items()))


def names_of(tables: Mapping[str, Any]) -> list[str]:
    """Return the names of the tables, as features use them."""
    return list(table_shapes(tables) if kind_of_tables(tables).faked else tables)


# -- how lookups read them ---------------------------------------------------------------------------------------------


def read_fake(
    tables: FakeQuantizedTables, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None
) -> LookupResult:
    """Return the lookup of rows that are rounded after the gather. Features are all pooled, or all sequences."""
    check("funcrec.lookup", part_problems(tables.tables, tables.scales, tables.dtypes))
    if faked := kind_of_tables(tables.tables).faked:
        return faked.read(tables, ids, features, implementation)
    shapes = {n: (t.shape[0], t.shape[1]) for n, t in tables.tables.items()}
    gather = lambda table, rows: rounded_rows(tables, table, rows, implementation)
    if features[0].pooling == "none":
        read = sequences_read(gather, ids, features, shapes)
    else:
        read = pooled_read(pooled(gather, ids, features, shapes, implementation), ids, features, shapes)
    return with_scales(read, tables) if tables.scales else read


def pooled(
    gather: Callable[[str, Tensor], Tensor],
    ids: KeyedJaggedTensor,
    features: Sequence[FeatureConfig],
    shapes: Mapping[str, tuple[int, int]],
    implementation: str | None,
) -> Tensor:
    """Return the bags f[B, C] of gathered rows. The rows lie feature by feature, and each row is read once."""
    bags = [sequence_rows(ids, f, shapes[f.table][0]) for f in features]
    rows = [gather(f.table, x.values) for f, x in zip(features, bags, strict=True)]
    first = list(accumulate((x.capacity for x in bags), initial=0))
    offsets = torch.cat([x.offsets + at for x, at in zip(bags, first[:-1], strict=True)])
    places = torch.cat([torch.arange(x.capacity, device=offsets.device) for x in bags])
    weights = None
    if any(f.weighted for f in features):
        dtype = sure(ids.weights).dtype
        own = lambda x: torch.ones_like(x.values, dtype=dtype) if x.weights is None else x.weights
        weights = torch.cat(list(map(own, bags)))
    column, told, num_bags = 0, [], bags[0].num_bags
    for i, f in enumerate(features):
        told.append(Feature(i, 0, i * (num_bags + 1), f.max_length or 0, f.pooling == "mean", f.weighted, column))
        column += shapes[f.table][1]
    return pooled_lookup(rows, [places], offsets, weights, told, num_bags, implementation=implementation)


def rounded_rows(tables: FakeQuantizedTables, table: str, rows: Tensor, implementation: str | None) -> Tensor:
    """Return f[N, D]: rows of a table as its codes hold them, in the dtype of sums; zeros for rows outside the
    table."""
    t, dtype = tables.tables[table], dict(tables.dtypes)[table]
    x = gather_rows(t, rows, implementation=implementation)
    if table + SCALE in tables.scales:
        scales = tables.scales[table + SCALE]
        if any_tracked((t, scales)) and not is_forward():  # in forward mode any tensor may have a tangent
            refuse_learned(table)
        return ByScale.apply(table, CODES[dtype], x, gather_rows(scales, rows, implementation=implementation))
    return as_stored(x, dtype, *row_keys(tables.rounding, table, rows, t.shape[1]))


# -- learned scales --------------------------------------------------------------------------------------------------


def with_scales(read: LookupResult, tables: FakeQuantizedTables) -> LookupResult:
    """Return the lookup with cotangents for the scales too. They are 0 where a code was clipped."""
    dtypes = dict(tables.dtypes)

    def transpose(d: Any, saved: Any) -> dict[str, RowGrads]:
        out, (inner, parts) = {}, saved
        for n, g in read.transpose(d, inner).items():
            if n + SCALE not in parts:
                out[n] = g
                continue
            entries, bits = g.entries(), CODES[dtypes[n]]
            x, s = (gather_rows(parts[p], entries.rows) for p in (n, n + SCALE))
            _, by_scales, by_rows = by_scale(x, s, bits)
            share = 1 / math.sqrt(x.shape[1] * (2 ** (bits - 1) - 1))
            for part, grads in (
                (n, by_rows * entries.grads),
                (n + SCALE, share * (by_scales * entries.grads).sum(1, True)),
            ):
                out[part] = RowGrads.from_entries(entries.rows, grads, num_embeddings=parts[part].shape[0])
        return out

    return read._replace(saved=lambda: (read.saved(), parts_of(tables)), transpose=transpose)


def quantize_fake(tables: FakeQuantizedTables, dtype: Any, key: Tensor | None) -> QuantizedTables:
    """Return the codes that lookups of these tables read, each table in its own dtype."""
    if dtype is not None:
        got, need = f"{dtype!r}; the tables have {dict(tables.dtypes)}", "None, for their own"
        fail("funcrec.quantize", "`dtype` is that of tables with one.", got=got, need=need, hint="fr.quantize(tables)")
    check("funcrec.quantize", part_problems(tables.tables, tables.scales, tables.dtypes))
    own = cast(dict[str, Dtype], dict(tables.dtypes))
    q = quantize(tables.tables, own, key=tables.rounding if key is None else key)
    if not tables.scales:
        return q
    learned = {n: learned_codes(t, tables.scales[n + SCALE], CODES[dtype]) for (n, dtype), t in
               zip(tables.dtypes, tables.tables.values(), strict=True) if n + SCALE in tables.scales}  # fmt: skip
    return replace(q, tables={**q.tables, **learned})


KINDS[FakeQuantizedTables] = Kind(
    lambda t: table_shapes(t.tables),
    read_fake,
    quantized=quantize_fake,
    placed="the float tables, `.tables`, and in the loss fr.fake_quantize(params.tables, dtype)",
)


# -- validators --------------------------------------------------------------------------------------------------


def part_problems(tables: Any, scales: Any, dtypes: Any) -> Iterator[Problem]:
    """Yield problems if `dtypes` does not name the tables in order, or if scales are not one number for each row."""
    for name, parts in (("tables", tables), ("scales", scales)):
        if not isinstance(parts, Mapping):
            got, need = describe(parts), "{name: f[R, D]}"
            yield Problem(f"`{name}` is not a dict.", got, need, "fr.fake_quantize(tables)", TypeError)
            return
    pairs = dtypes if isinstance(dtypes, tuple) and all(isinstance(d, tuple) and len(d) == 2 for d in dtypes) else ()
    if [n for n, _ in pairs] != names_of(tables) or any(d not in get_args(Dtype) for _, d in pairs):
        need = f"(table, dtype) for each of {names_of(tables)}, in order, of {list(get_args(Dtype))}"
        yield Problem("`dtypes` do not match the tables.", repr(dtypes), need, "fr.fake_quantize(tables, dtype)")
        return
    if faked := kind_of_tables(tables).faked:
        yield from faked.problems(tables, dict(pairs))
    of = {} if faked else {n + SCALE: n for n, dtype in pairs if dtype in CODES}
    for part, s in scales.items():
        if part not in of:
            yield Problem(f"`scales[{part!r}]` belongs to no table of codes.", f"{part!r}", f"one of {list(of)}")
            continue
        t = tables[of[part]]
        if not (isinstance(s, Tensor) and isinstance(t, Tensor)):  # placeholders of tensors
            continue
        if s.shape != (*t.shape[:-1], 1) or not s.is_floating_point():
            kind, need = ValueError if s.is_floating_point() else TypeError, f"f[{t.shape[0]}, 1], of {describe(t)}"
            yield Problem(f"`scales[{part!r}]` do not match the table.", describe(s), need, "fr.fake_quantize", kind)


def fake_problems(tables: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield problems unless `tables` is a dict of float tables, or of references to them in a loss."""
    if kind_of_tables(tables).faked:
        return
    if not is_plain(tables):
        need, hint = "{name: f[R, D]}, or ShardedTables", "fr.fake_quantize(tables.tables, ...) of fake-quantised ones"
        yield Problem("`tables` are not plain tables.", describe(tables), need, hint, TypeError)
        return
    for n, t in tables.items():
        if not isinstance(t, TableRef):
            yield from tensor_problems(t, f"tables[{n!r}]")


def faked_problems(tables: Any, dtypes: Mapping[str, str], scales: str) -> Iterator[Problem]:
    yield from sure(kind_of_tables(tables).faked).problems(tables, dtypes)
    if scales == "learned":
        got, hint = describe(tables), 'scales="row"; or learned ones in one process, placed by fr.quantize at the end'
        yield Problem("learned scales belong to plain tables.", got, "{name: f[R, D]}", hint, TypeError)


def learned_problems(tables: Mapping[str, Any], key: Tensor | None) -> Iterator[Problem]:
    for n, t in tables.items():
        if isinstance(t, TableRef):
            hint = 'fr.Params(fr.fake_quantize(tables, scales="learned"), dense), for the state'
            got, need = "a loss's table", "tables outside of a loss"
            yield Problem(f"the scales of `tables[{n!r}]` would not be parameters.", got, need, hint, TypeError)
        if n + SCALE in tables:
            yield Problem(f"`tables` has a table named {n + SCALE!r}.", f"{list(tables)}", "another name", "'scales'")
    if key is not None:
        yield Problem("`key` requires scales of rows.", "a key, and learned scales", "one of both", "key=None")
