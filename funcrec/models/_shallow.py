"""Logistic regression and factorization machines, and the first-order term that other models use.

    lr: z = b + ⟨w, dense⟩ + Σ_f v_f          fm: z = lr + Σ_{i<j} ⟨e_i, e_j⟩

v_f is a pooled first-order weight (dim 1), e_f a pooled embedding. Shapes: B batch, F features, D dim.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from funcrec import nn
from funcrec.core import Size, check, remade, typed
from funcrec.models._model import Model, build, check_configs, equal_dim_problems, part
from funcrec.tables import Batch, FeatureConfig, Params, TableConfig, lookup


@remade
@typed
def lr(tables: Sequence[TableConfig], features: Sequence[FeatureConfig], *, num_dense: Size = 0) -> Model:
    """Return logistic regression: a bias, a weight for each id, and a weight for each dense input.

    The tables of its features have embedding_dim 1.

    Example:
      >>> import funcrec as fr
      >>> model = fr.models.lr((fr.TableConfig("item", 10, 1),), (fr.FeatureConfig("item", table="item"),))
      >>> sorted(model.init(fr.key(0)).dense)
      ['bias']
    """
    check_configs("funcrec.models.lr", tables, (), features)
    init, term = first_order(features, num_dense)
    return build("funcrec.models.lr", tables, features, num_dense, init, lambda p, b, key: (term(p, b), {}))


@remade
@typed
def fm(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    *,
    linear: Sequence[FeatureConfig] = (),
    num_dense: Size = 0,
) -> Model:
    """Return a factorization machine: first order by `linear` and the dense inputs, second order over `features`.

    Args:
      linear: features of tables with embedding_dim 1, such as `linear_twins` returns.

    Raises:
      ValueError: `features` have different dims.

    Example:
      >>> import funcrec as fr
      >>> tables = (fr.TableConfig("user", 10, 4), fr.TableConfig("item", 20, 4))
      >>> features = (fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item"))
      >>> wide_tables, wide = fr.models.linear_twins(tables, features)
      >>> model = fr.models.fm(tables + wide_tables, features, linear=wide)
      >>> fr.models.num_parameters(model.init(fr.key(0)))
      151

    Source: Rendle, "Factorization Machines" (2010), eq. 1.
    """
    check_configs("funcrec.models.fm", tables, features, linear)
    check("funcrec.models.fm", equal_dim_problems(features, tables))
    init, term = first_order(linear, num_dense)

    def forward(params: Params, batch: Batch, key: Tensor | None):
        pairs = nn.factorization_machine(lookup(params.tables, batch.ids, features).stack())
        return term(params, batch) + pairs, {}

    return build("funcrec.models.fm", tables, (*features, *linear), num_dense, init, forward)


def first_order(linear: Sequence[FeatureConfig], num_dense: int) -> tuple[Callable, Callable]:
    """Return (init, term) of b + ⟨w, dense⟩ + Σ over `linear`, f[B]. b is dense["bias"] and w is dense["linear"]."""

    def init(key: Tensor) -> dict[str, Any]:
        bias = {"bias": nn.zeros(key, (1,))}
        return {**bias, "linear": nn.xavier_normal(key, (1, num_dense))} if num_dense else bias

    def term(params: Params, batch: Batch) -> Tensor:
        total = part(params.dense, "bias", (1,))
        if num_dense:
            total = total + (batch.dense * part(params.dense, "linear", (1, num_dense))).sum(1)
        if linear:
            total = total + lookup(params.tables, batch.ids, linear).values.sum(1)
        return total

    return init, term
