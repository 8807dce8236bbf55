"""Two towers: query and candidate become unit vectors. The other candidates of the batch are the negatives in training.

    loss = -mean_i log softmax_j(⟨q_i, c_j⟩ / T - log Q_j)[i],   q = mlp(queries) / ‖·‖, c = mlp(candidates) / ‖·‖

Q_j is the probability that the batch holds candidate j. Without this correction, popular items get lower scores.
Shapes: B batch, D dim of the towers' outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from funcrec import losses, nn
from funcrec.core import (
    PositiveMagnitude,
    Share,
    Sizes,
    check,
    html_table,
    random,
    reduced,
    remade,
    shown,
    typed,
    typed_fields,
)
from funcrec.models._deep import run, width
from funcrec.models._model import TrainingLoss, build, check_configs, input_problems, part
from funcrec.tables import HEAD, Batch, FeatureConfig, Params, TableConfig, duplicate_problems, lookup, table_lines


@typed_fields
class TwoTower(NamedTuple):
    """A retrieval model of two towers.

    tables, features: all tables and features. The features of the query come first.
    init: (key) -> Params, dense {"query": ..., "candidate": ...}.
    query, candidate: (params, batch) -> f[B, D], unit vectors, as in evaluation. Each reads only its own columns.
    towers: (params, batch, key) -> (f[B, D], f[B, D]), query and candidate, as in training.
    apply: (params, batch) -> f[B], ⟨q_b, c_b⟩ / temperature for the pair of each example.
    temperature: T.

    Example: see `two_tower`.
    """

    tables: tuple[TableConfig, ...]
    features: tuple[FeatureConfig, ...]
    init: Callable[[Tensor], Params]
    query: Callable[[Params, Batch], Tensor]
    candidate: Callable[[Params, Batch], Tensor]
    towers: Callable[[Params, Batch, Tensor], tuple[Tensor, Tensor]]
    apply: Callable[[Params, Batch], Tensor]
    temperature: PositiveMagnitude

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def __repr__(self) -> str:
        return shown(self)

    def _repr_html_(self) -> str:
        """Return the tables of the model in HTML, for a notebook."""
        return html_table(HEAD, table_lines(self.tables, self.features))


@remade
@typed
def two_tower(
    tables: Sequence[TableConfig],
    query: Sequence[FeatureConfig],
    candidate: Sequence[FeatureConfig],
    *,
    sizes: Sizes = (128, 64),
    dropout: Share = 0.0,
    temperature: PositiveMagnitude = 0.05,
) -> TwoTower:
    """Return a model of two MLPs: over the features of the query, and over the features of the candidate.

    Both MLPs end in vectors of sizes[-1].

    Args:
      sizes: the layers of each tower, with ReLU between them. The last layer is linear.
      temperature: T > 0, static.

    Example:
      >>> import torch, funcrec as fr
      >>> tables = (fr.TableConfig("user", 10, 4), fr.TableConfig("item", 20, 4))
      >>> query, candidate = (fr.FeatureConfig("user", table="user"),), (fr.FeatureConfig("item", table="item"),)
      >>> model = fr.models.two_tower(tables, query, candidate, sizes=(8, 3))
      >>> params = model.init(fr.key(0))
      >>> items = fr.Batch(fr.KeyedJaggedTensor.from_lists({"item": [[0], [1]]}), torch.zeros(2))
      >>> model.candidate(params, items).norm(dim=1).round(decimals=4)
      tensor([1., 1.])

    Source: Yi et al., "Sampling-bias-corrected neural modeling" (RecSys 2019), fig. 2.
    """
    call = "funcrec.models.two_tower"
    for side in (query, candidate):
        check_configs(call, tables, side)
    check(call, duplicate_problems((*query, *candidate), "features"))
    sides = {"query": tuple(query), "candidate": tuple(candidate)}
    layers = {name: nn.mlp((width(tables, own), *sizes), dropout=dropout) for name, own in sides.items()}

    def init_dense(key: Tensor) -> dict:
        return {name: layers[name].init(k) for name, k in zip(sides, random.split(key), strict=True)}

    def tower(name: str, params: Params, batch: Batch, key: Tensor | None) -> Tensor:
        check(f"{call}.{name}", input_problems(params, batch, None))
        acts = lookup(params.tables, batch.ids, sides[name]).values
        return F.normalize(run(layers[name], part(params.dense, name), acts, key)[0], dim=-1)

    def towers(params: Params, batch: Batch, key: Tensor | None) -> tuple[Tensor, Tensor]:
        keys = (None, None) if key is None else random.split(key)
        q, c = (tower(name, params, batch, k) for name, k in zip(sides, keys, strict=True))
        return q, c

    def score(params: Params, batch: Batch, key: Tensor | None) -> tuple[Tensor, dict]:
        q, c = towers(params, batch, key)
        return (q * c).sum(-1) / temperature, {}

    model = build(call, tables, (*query, *candidate), None, init_dense, score)
    return TwoTower(
        model.tables,
        model.features,
        model.init,
        lambda params, batch: tower("query", params, batch, None),
        lambda params, batch: tower("candidate", params, batch, None),
        towers,
        model.apply,
        temperature,
    )


@typed
def in_batch_softmax(
    query: Tensor,
    candidate: Tensor,
    *,
    temperature: float = 1.0,
    log_q: Tensor | None = None,
    candidate_ids: Tensor | None = None,
) -> Tensor:
    """Return the loss f[] of `fr.losses.in_batch_softmax`. `log_q` corrects it for popular candidates.

    Shapes: query, candidate f[B, D]; log_q f[B]; candidate_ids i[B].

    Example:
      >>> import torch, funcrec as fr
      >>> x = torch.eye(2)
      >>> fr.models.in_batch_softmax(x, x, temperature=0.5)
      tensor(0.1269)
    """
    return losses.in_batch_softmax(query, candidate, log_q=log_q, temperature=temperature, candidate_ids=candidate_ids)


@typed
def in_batch_softmax_loss(
    model: TwoTower,
    *,
    log_q: Callable[[Batch], Tensor] | None = None,
    candidate_ids: Callable[[Batch], Tensor] | None = None,
) -> TrainingLoss[tuple[Tensor, dict[str, Any]]]:
    """Return the training loss of two towers: (params, batch, *, key) -> (f[], {"logits": f[B], "stats": {}}).

    Args:
      log_q: (batch) -> f[B], for instance the log of the items' frequencies. None means no correction.
      candidate_ids: (batch) -> i[B], to recognise repeated candidates. With None, repeats count as negatives.

    Example:
      >>> import torch, funcrec as fr
      >>> tables = (fr.TableConfig("user", 10, 4), fr.TableConfig("item", 20, 4))
      >>> query, candidate = (fr.FeatureConfig("user", table="user"),), (fr.FeatureConfig("item", table="item"),)
      >>> model = fr.models.two_tower(tables, query, candidate, sizes=(8, 3))
      >>> items = lambda batch: batch.ids["item"].to_padded(1)[:, 0]
      >>> loss_fn = fr.models.in_batch_softmax_loss(model, candidate_ids=items)
      >>> ids = fr.KeyedJaggedTensor.from_lists({"user": [[0], [1]], "item": [[5], [5]]})
      >>> loss_fn(model.init(fr.key(0)), fr.Batch(ids, torch.ones(2)), key=fr.key(1))[0]
      tensor(0.)
    """

    def loss_fn(params: Params, batch: Batch, *, key: Tensor):
        q, c = model.towers(params, batch, key)
        value = losses.in_batch_softmax(
            q,
            c,
            batch.weight,
            temperature=model.temperature,
            log_q=None if log_q is None else log_q(batch),
            candidate_ids=None if candidate_ids is None else candidate_ids(batch),
        )
        return value, {"logits": (q * c).sum(-1) / model.temperature, "stats": {}}

    return loss_fn
