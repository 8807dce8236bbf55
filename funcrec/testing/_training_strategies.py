"""Strategies for what training takes: gradients, meshes, plans, batches and states, made of other strategies.

    batches(ids)  gradients(tables)  plans(tables, mesh)  train_states(configs)

They are names of `funcrec.testing.strategies`. B bags, R rows, D dim, T tasks.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from hypothesis import strategies as st
from torch import Tensor

from funcrec.core import key, tree_map
from funcrec.jagged import KeyedJaggedTensor
from funcrec.mesh import Mesh
from funcrec.optim import RowOptimizer, adam, dense, rowwise_adagrad, sgd
from funcrec.sharding import OF_TWO_AXES, Placement, Plan
from funcrec.tables import Batch, Params, RowGrads, TableConfig
from funcrec.testing._drawn import INT_DTYPES, garbage, lists_of, tensors
from funcrec.train import TrainState

PLACEMENTS = ("replicated", "row_wise", "table_wise", "column_wise", *OF_TWO_AXES)
OPTIMIZERS = (sgd(0.25), rowwise_adagrad(0.25), adam(0.25))


@st.composite
def batches(
    draw,
    ids: st.SearchStrategy[KeyedJaggedTensor],
    *,
    num_tasks: int | None = None,
    max_dense: int = 2,
    weighted: bool | None = None,
) -> Batch:
    """Draw a Batch of drawn ids, with labels f32[B] of 0 and 1. It shrinks to labels 0, no dense inputs, no weights.

    Args:
      ids: for instance `keyed_jagged_tensors(keys=["a"])`, or `st.just(ids)`. All keys have one number of bags, or
        there are inverse indices.
      num_tasks: T for labels f32[B, T]; None for f32[B].
      max_dense: the most dense inputs of an example, f32[B, n]; with 0 of them `dense` is None.
      weighted: whether examples have weights, multiples of 1/4 from 0 to 4; None for either.

    Example:
      >>> from hypothesis import find
      >>> from funcrec.testing import strategies as frs
      >>> find(frs.batches(frs.keyed_jagged_tensors(keys=["a"], min_bags=2)), lambda b: b.label.sum() > 0).label
      tensor([0., 1.])
    """
    own = draw(ids)
    n = own.num_examples
    shape = (n,) if num_tasks is None else (n, num_tasks)
    label = torch.tensor(draw(lists_of(st.integers(0, 1), prod(shape))), dtype=torch.float32).reshape(shape)
    width = draw(st.integers(0, max_dense))
    has_weights = draw(st.booleans()) if weighted is None else weighted
    weight = torch.tensor(draw(lists_of(st.integers(0, 16), n)), dtype=torch.float32) / 4 if has_weights else None
    dense = {"dense": draw(tensors((n, width)))} if width else {}
    return Batch(own, label, weight=weight, **dense)


@st.composite
def row_grads(
    draw,
    *,
    num_embeddings: int | None = None,
    embedding_dim: int | None = None,
    max_entries: int = 6,
    max_padding: int = 3,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    row_dtypes: Sequence[torch.dtype] = INT_DTYPES,
    coalesced: bool | None = False,
) -> RowGrads:
    """Draw RowGrads with repeated rows, rows of no table, and garbage past `count`.

    They shrink to no entries of a 1 x 1 table.

    Args:
      num_embeddings, embedding_dim: the shape of the table; None for 1 to 6 and 1 to 3.
      coalesced: False for entries in any order, True for distinct ascending rows, None for either.
    """
    num_embeddings = draw(st.integers(1, 6)) if num_embeddings is None else num_embeddings
    embedding_dim = draw(st.integers(1, 3)) if embedding_dim is None else embedding_dim
    dtype, row_dtype = draw(st.sampled_from(dtypes)), draw(st.sampled_from(row_dtypes))
    padding = draw(st.integers(0, max_padding))
    inside = st.integers(0, num_embeddings - 1)
    if draw(st.booleans()) if coalesced is None else coalesced:
        rows = sorted(draw(st.lists(inside, max_size=max_entries, unique=True)))
        repeats = [draw(st.integers(1, 3)) for _ in rows] + [0] * padding
    else:
        rows = draw(st.lists(st.one_of(inside, garbage(row_dtype)), max_size=max_entries))
        repeats = None
    valid = torch.tensor([0 <= r < num_embeddings for r in rows] + [False] * padding, dtype=torch.bool)
    grads = draw(tensors((len(valid), embedding_dim), dtype=dtype))
    return RowGrads.from_entries(
        torch.tensor(rows + draw(lists_of(garbage(row_dtype), padding)), dtype=row_dtype),
        torch.where(valid[:, None], grads, draw(garbage(dtype))),
        num_embeddings=num_embeddings,
        count=torch.tensor(len(rows)),
        repeats=None if repeats is None else torch.tensor(repeats, dtype=torch.int64),
        coalesced=repeats is not None,
    )


@st.composite
def gradients(draw, params: Params, **options) -> Params:
    """Draw gradients in the form of `value_and_grad`'s: RowGrads for each table, tensors for dense leaves.

    Args:
      params: tables {name: f[R, D]}, and dense parameters of any tree; for instance `state.params`.
      options: those of `row_grads`, but for the shape and dtype, which are the table's.

    Example:
      >>> import torch, funcrec as fr
      >>> from hypothesis import find
      >>> from funcrec.testing import strategies as frs
      >>> params = fr.Params({"item": torch.zeros(5, 2)}, torch.zeros(3))
      >>> find(frs.gradients(params), lambda g: int(g.tables["item"].count) > 0).dense
      tensor([0., 0., 0.])
    """
    own = {
        n: draw(row_grads(num_embeddings=x.shape[0], embedding_dim=x.shape[1], dtypes=(x.dtype,), **options))
        for n, x in params.tables.items()
    }
    return Params(own, tree_map(lambda x: draw(tensors(x.shape, dtype=x.dtype)), params.dense))


@st.composite
def meshes(draw, *, min_axes: int = 1, max_axes: int = 2, max_ranks: int = 8) -> Mesh:
    """Draw an emulated Mesh of axes "x", "y", ... of one to four ranks each. It shrinks to one axis of one rank."""
    sizes: dict[str, int] = {}
    for name in "xyzuvw"[: draw(st.integers(min_axes, max_axes))]:
        sizes[name] = draw(st.integers(1, min(4, max_ranks // prod(sizes.values()))))
    return Mesh.emulated(**sizes)


@st.composite
def plans(
    draw,
    tables: Sequence[TableConfig] | Mapping[str, Tensor],
    mesh: Mesh,
    *,
    kinds: Sequence[str] = PLACEMENTS,
    replicas: bool = False,
) -> Plan:
    """Draw a Plan in which each of the `tables` has a placement of its own on the mesh.

    It shrinks to replicated tables, without replicas; for other kinds to the first ranks of the first axes.

    Args:
      kinds: the kinds of placements. Kinds of two axes are left out if the mesh has fewer axes.
      replicas: whether copies may train apart along some of the axes.
    """
    names = list(tables) if isinstance(tables, Mapping) else [t.name for t in tables]
    apart = draw(st.lists(st.sampled_from(mesh.axis_names), unique=True)) if replicas else []
    sizes = {a: n for a, n in mesh.shape.items() if a not in apart}
    return Plan({n: draw(_placements(sizes, kinds)) for n in names}, tuple(apart))


@st.composite
def _placements(draw, sizes: Mapping[str, int], kinds: Sequence[str]) -> Placement:
    """Draw a Placement of one of the kinds on axes of these sizes."""
    needed = lambda kind: 2 if kind in OF_TWO_AXES else int(kind != "replicated")
    kind = draw(st.sampled_from([k for k in kinds if needed(k) <= len(sizes)]))
    most = {2: 2, 1: len(sizes), 0: 0}[needed(kind)]
    axes = draw(st.lists(st.sampled_from([*sizes]), min_size=needed(kind), max_size=most, unique=True)) if most else []
    place = st.integers(0, prod(sizes[a] for a in (axes[:1] if kind in OF_TWO_AXES else axes)) - 1)
    some = st.lists(place, max_size=4, unique=kind == "grid")
    ranks = (
        [] if kind in ("row_wise", "replicated") else draw(some) if kind in ("column_wise", "grid") else [draw(place)]
    )
    return Placement(kind, tuple(axes), tuple(ranks))


@st.composite
def train_states(
    draw, configs: Sequence[TableConfig], *, optimizers: Sequence[RowOptimizer] = OPTIMIZERS, max_step: int = 5
) -> TrainState:
    """Draw a TrainState after 0 to `max_step` steps: tables, slots >= 0, dense parameters f32[3] and a key.

    It shrinks to step 0, zeros, and the slots of the first optimizer. Its dense optimizer is SGD.

    Args:
      configs: the tables, as `table_configs` draws them.
      optimizers: the row optimizers of which one makes the slots.

    Example:
      >>> import funcrec as fr
      >>> from hypothesis import find
      >>> from funcrec.testing import strategies as frs
      >>> find(frs.train_states([fr.TableConfig("item", 2, 1)]), lambda state: True)
      TrainState(step=0, tables={item: f32[2, 1]}, slots=0 tensors, dense=1 tensor, dense_opt=0 tensors)
    """
    held = {t.name: draw(tensors(t.shape, dtype=t.dtype)) for t in configs}
    slots = tree_map(lambda x: draw(filled(x)), draw(st.sampled_from(optimizers)).init(held))
    weights = {"w": draw(tensors((3,)))}
    step, seed = draw(st.integers(0, max_step)), draw(st.integers(0, 9))
    return TrainState(
        torch.tensor(step), held, slots, weights, dense(torch.optim.SGD, lr=0.25).init(weights), key(seed)
    )


def filled(x: Tensor) -> st.SearchStrategy[Tensor]:
    """Return a strategy for slots in the form of x: numbers >= 0; integers stay."""
    return tensors(x.shape, dtype=x.dtype).map(torch.abs) if x.is_floating_point() else st.just(x)
