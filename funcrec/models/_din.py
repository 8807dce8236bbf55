"""Deep Interest Network: the target attends to the history of its user.

    z = mlp([e_1 ... e_F, u, dense]),   u = Σ_i mlp([h_i, t, h_i - t, h_i ⊙ t]) h_i

h_i is a vector of the history, and t the target's vector. Shapes: B batch, N ids of the history, D dim.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec import nn
from funcrec.core import Name, Problem, Share, Size, Sizes, check, random, remade, reported, typed, unknown_problems
from funcrec.jagged import JaggedTensor, is_concrete
from funcrec.models._deep import deep_part, width, with_dense
from funcrec.models._model import Model, build, check_configs, equal_bag_problems, part, sequence_problems, used
from funcrec.models._shallow import first_order
from funcrec.tables import (
    Batch,
    FeatureConfig,
    Params,
    TableConfig,
    feature_list_problems,
    feature_table_problems,
    lookup,
    lookup_sequence,
)

CALL = "funcrec.models.din"


@remade
@typed
def din(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    *,
    history: Sequence[FeatureConfig],
    target: Sequence[Name],
    linear: Sequence[FeatureConfig] = (),
    num_dense: Size = 0,
    attention: Sizes = (80, 40),
    normalize: bool = False,
    sizes: Sizes = (200, 80),
    dropout: Share = 0.0,
    batch_norm: bool = False,
) -> Model:
    """Return a Deep Interest Network: an MLP of the features, and of a history weighted by its match with the target.

    Args:
      features: pooled features, among them the target.
      history: sequences (pooling "none") of equal bags, such as items and their categories. Their vectors are
        concatenated.
      target: the name of a feature for each sequence, with vectors of the same width.
      linear: features of dim 1, whose sum is added to the logit. The model of the paper has none.
      attention, normalize: `sizes` and `normalize` of `nn.target_attention`.
      sizes: the hidden layers of the MLP, each with ReLU. An output layer follows them.

    Raises:
      ValueError: from apply, if the bags of two sequences differ. Under `jit` or on a GPU the offsets cannot be read;
        there the logits are NaN instead.

    Example:
      >>> import torch, funcrec as fr
      >>> tables, features = (fr.TableConfig("item", 10, 4),), (fr.FeatureConfig("item", table="item"),)
      >>> clicked = fr.FeatureConfig("clicked", table="item", pooling="none", max_length=50)
      >>> model = fr.models.din(tables, features, history=[clicked], target=["item"])
      >>> ids = fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]], "clicked": [[3, 4, 5], []]})
      >>> model.apply(model.init(fr.key(0)), fr.Batch(ids)).shape
      torch.Size([2])

    Source: Zhou et al., "Deep interest network for click-through rate prediction" (KDD 2018), fig. 2.
    """
    check_configs(CALL, tables, features, linear)
    check(CALL, feature_list_problems(history), feature_table_problems(history, tables))
    check(CALL, history_problems(tables, features, history, target))
    own = width(tables, history)
    attend = nn.target_attention(own, sizes=attention, normalize=normalize)
    init_deep, deep = deep_part(width(tables, features) + own + num_dense, sizes, dropout, batch_norm)
    init_wide, wide = first_order(linear, 0)

    def init(key: Tensor) -> dict[str, Any]:
        for_attention, for_deep = random.split(key)
        first = init_wide(key) if linear else {}
        return {**first, "attention": attend.init(for_attention), **init_deep(for_deep)}

    def forward(params: Params, batch: Batch, key: Tensor | None):
        acts = lookup(params.tables, batch.ids, features)
        bags, is_equal = joined(lookup_sequence(params.tables, batch.ids, history), history)
        t = torch.cat([acts[name] for name in target], 1)
        u = attend.apply(part(params.dense, "attention"), bags, t)
        z, stats = deep(params.dense, with_dense(torch.cat([acts.values, u], 1), batch), key, used(batch))
        z = z if is_equal is None else torch.where(is_equal, z, torch.nan)
        return (wide(params, batch) + z if linear else z), stats

    return build(CALL, tables, (*features, *history, *linear), num_dense, init, forward)


def joined(sequences: dict[str, JaggedTensor], history: Sequence[FeatureConfig]) -> tuple[JaggedTensor, Tensor | None]:
    """Return the concatenated vectors of sequences with equal bags, and whether the bags are equal.

    The second is None for one sequence, or if it was checked on the host."""
    first, *others = [sequences[f.name] for f in history]
    if not others:
        return first, None
    is_equal = torch.stack([(first.offsets == x.offsets).all() for x in others]).all()
    if is_concrete(is_equal):
        check(CALL, equal_bag_problems(bool(is_equal)))
        is_equal = None
    capacity = min(x.capacity for x in (first, *others))
    values = torch.cat([x.values[:capacity] for x in (first, *others)], 1)
    return JaggedTensor(values, first.offsets), is_equal


# -- validators --------------------------------------------------------------------------------------------------


def history_problems(tables, features, history, target) -> Iterator[Problem]:
    dims, named = {t.name: t.embedding_dim for t in tables}, {f.name: f for f in features}
    yield from sequence_problems("history", history)
    if (yield from reported(unknown_problems("`target` names features that are not there.", target, named))):
        return
    if len(target) != len(history):
        need = "a feature for each sequence"
        yield Problem("`target` does not match `history`.", f"{len(target)} and {len(history)}", need)
    else:
        got = {f.name: (dims[f.table], dims[named[t].table]) for f, t in zip(history, target, strict=True)}
        if any(a != b for a, b in got.values()):
            yield Problem("`target` has another width than `history`.", f"{got}", "equal dims")
