"""HSTU as a ranker: context, history and candidates are one jagged sequence, in which candidates do not see each other.

    s_b = [context_b, history_b, candidates_b],   x = content(e) + action,   y = layers(x)
    logits of candidate c = head(norm(y_c) ⊙ item(e_c)) ∈ R^T

Each candidate sees the context, the history and itself. So one pass scores all candidates, and the keys and values of
the history serve other candidates too (M-FALCON). Shapes: B bags, N capacity of the history, M capacity of the
candidates, C candidates of a label, T tasks, D dim of the sequence.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec import losses as all_losses
from funcrec import nn
from funcrec.core import (
    Count,
    Magnitude,
    Name,
    PositiveMagnitude,
    Share,
    Size,
    check,
    fail,
    html_table,
    map_tensors,
    random,
    reduced,
    remade,
    replace,
    shown,
    sure,
    typed,
    typed_fields,
)
from funcrec.jagged import JaggedTensor, joined_bags, take_ranges
from funcrec.models._deep import width
from funcrec.models._hstu_checks import CALL, column_problems, count_problems, hstu_problems, kept_problems
from funcrec.models._hstu_history import HISTORY, History
from funcrec.models._hstu_parts import (
    Columns,
    Layers,
    Positions,
    by_bag,
    candidates_of,
    context_of,
    first_times,
    history_of,
    init_dense,
    tower,
)
from funcrec.models._model import input_problems, part
from funcrec.tables import HEAD, Batch, FeatureConfig, Params, TableConfig, init, table_lines


@typed_fields
class HstuRanker(NamedTuple):
    """A model that scores candidates by a history, as `hstu_ranker` makes it.

    tables: every table of `params.tables`.
    features: every feature. The context comes first, then the history, then the candidates.
    init: (key) -> Params.
    apply: (params, batch) -> bags f[M, T], the logits of the candidates, as in evaluation.
    train_apply: (params, batch, key) -> bags f[M, T], with dropout.
    encode_history: (params, batch) -> History. This does not read the candidates. score: (params, History, batch)
    -> bags f[M, T], those of `apply`. This reads only the candidates of the batch. query: (params, batch) -> f[B, D], a
    vector of the user after the history, for retrieval. num_tasks: T.
    """

    tables: tuple[TableConfig, ...]
    features: tuple[FeatureConfig, ...]
    init: Callable[[Tensor], Params]
    apply: Callable[[Params, Batch], JaggedTensor]
    train_apply: Callable[[Params, Batch, Tensor], JaggedTensor]
    encode_history: Callable[[Params, Batch], History]
    score: Callable[[Params, History, Batch], JaggedTensor]
    query: Callable[[Params, Batch], Tensor]
    num_tasks: Count

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def __repr__(self) -> str:
        return shown(self)

    def _repr_html_(self) -> str:
        """Return the tables of the model in HTML, for a notebook."""
        return html_table(HEAD, table_lines(self.tables, self.features))


@remade
@typed
def hstu_ranker(
    tables: Sequence[TableConfig],
    *,
    history: Sequence[FeatureConfig],
    candidates: Sequence[FeatureConfig],
    context: Sequence[FeatureConfig] = (),
    action: Name | None = None,
    time: Name | None = None,
    query_time: Name | None = None,
    action_weights: Sequence[Count] = (1, 2, 4, 8, 16),
    num_tasks: Count = 1,
    dim: Count = 64,
    num_layers: Count = 2,
    num_heads: Count = 2,
    qk_dim: Count = 32,
    linear_dim: Count = 32,
    normalizer: PositiveMagnitude = 256.0,
    num_positions: Size = 256,
    num_times: Size = 32,
    hidden: Count = 64,
    head: Count = 64,
    action_dim: Count = 8,
    action_std: Magnitude = 0.1,
    input_dropout: Share = 0.2,
    dropout: Share = 0.1,
    concatenate: bool = False,
) -> HstuRanker:
    """Return a ranker of HSTU layers (hierarchical sequential transduction units), the model of MLPerf's DLRMv3.

    Args:
      history: sequences (pooling "none") of equal bags, such as items and their categories. If all have one
        `max_length`, bags are cut at their end and buffers are smaller; then give the latest positions
        (`fr.data.histories(max_length=...)`).
      candidates: a sequence of the candidates for each feature of `history`, with the same table.
      context: pooled features of the user, one position each, before the history.
      action: the column of integers, one for each position of the history, whose bits say what the user did. None means
        no actions.
      time, query_time: the columns of the history's times, and of the time of each request (one id a bag: more are not
        read, and an empty bag counts as 0). None means that times are not read.
      action_weights: the bits, one embedding each.
      num_tasks: T, the logits of each candidate.
      dim, num_layers, num_heads, qk_dim, linear_dim, normalizer, num_positions, num_times, concatenate, dropout: of the
      layers, as in `nn.hstu_layer`. num_times is read only if `time` is given. hidden, head: the hidden sizes of the
      MLPs before the layers and after. action_dim, action_std: the dim and the first deviation of the actions'
      embeddings.
      input_dropout: the rate before the first layer.

    Returns:
      HstuRanker, trained by `ranker_loss`.

    Raises:
      ValueError: from its functions, if the bags of two columns of the history, or of two columns of the candidates,
        differ. If their offsets cannot be read (under `jit`, on a GPU, in a package), the answers of such a user are
        NaN. The answers of other users are right.

    Law: `apply` gives each candidate the logits that it has alone, and so does `score`.

    A package takes and answers tensors with a row for each user. `model.apply(params, batch).to_padded(C)` answers a
    request of history and candidates. `History.to_padded` and `History.from_padded` let one package keep a history, and
    another score candidates by it.

    Example:
      >>> import torch, funcrec as fr
      >>> feature = lambda name: fr.FeatureConfig(name, table="item", pooling="none", max_length=8)
      >>> model = fr.models.hstu_ranker([fr.TableConfig("item", 100, 16)], history=[feature("seen")],
      ...     candidates=[feature("next")])
      >>> params = model.init(fr.key(0))
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"seen": [[1, 2], [3]], "next": [[4], [5, 6]]}))
      >>> model.apply(params, batch).unpad().values.shape
      torch.Size([3, 1])
      >>> kept = model.encode_history(params, batch)
      >>> torch.allclose(model.score(params, kept, batch).values, model.apply(params, batch).values, atol=1e-5)
      True

    Source: Zhai et al., "Actions Speak Louder than Words" (ICML 2024); MLCommons inference v6.0, DLRMv3.
    """
    check(CALL, hstu_problems(tables, context, history, candidates, time, query_time))
    columns = Columns(
        tuple(tables), tuple(context), tuple(history), tuple(candidates), action, time, query_time,
        tuple(action_weights),
    )  # fmt: skip
    of_item = width(tables, history)
    layer = nn.hstu_layer(
        dim, normalizer=normalizer, num_heads=num_heads, qk_dim=qk_dim, linear_dim=linear_dim, dropout=dropout,
        num_positions=num_positions, num_times=num_times if time else 0, concatenate=concatenate,
    )  # fmt: skip
    layers = Layers(
        content=tower(of_item, hidden, dim),
        item=tower(of_item, head, dim),
        norm=nn.layer_norm(dim),
        head=tower(dim, head, num_tasks, normed=False),
        context=[nn.linear(width(tables, [f]), dim) for f in context],
        action=[tower(len(action_weights) * action_dim, hidden, dim)] if action else [],
        hstu=[layer] * num_layers,
    )

    def init_params(key: Tensor) -> Params:
        random.check_key(f"{CALL}.init", key)
        for_tables, for_dense = random.split(key)
        dense = init_dense(columns, layers, action_dim, action_std, for_dense)
        return Params(init(for_tables, tables), map_tensors(lambda x: x.to(key.device), dense))

    return _ranker(columns, layers, init_params, input_dropout, num_tasks)


def _ranker(columns: Columns, layers: Layers, init_params: Callable, input_dropout: float, count: int) -> HstuRanker:
    return HstuRanker(
        columns.tables,
        (*columns.context, *columns.history, *columns.candidates),
        init_params,
        lambda params, batch: _apply(columns, layers, params, batch),
        lambda params, batch, key: _train_apply(columns, layers, params, batch, key, input_dropout),
        lambda params, batch: _encode(columns, layers, params, batch),
        lambda params, history, batch: _score(columns, layers, params, history, batch),
        lambda params, batch: _query(columns, layers, params, batch),
        count,
    )


@typed
def ranker_loss(
    model: HstuRanker,
    losses: Sequence[Callable[..., Tensor]] = (all_losses.bce,),
    *,
    weights: Sequence[Magnitude] | None = None,
) -> Callable[..., Any]:
    """Return the training loss of a ranker: the mean over candidates, summed over the tasks.

    Args:
      losses, weights: one for each task, as in `losses.multi_task`. One loss serves all tasks.

    Returns:
      loss_fn(params, batch, *, key) -> (f[], {"logits": f[M, T], "label": f[M, T], "weight": f[M], "stats": {}}).
      `batch.label` is f[B, C], or f[B, C, T] for T tasks: the label of the c-th candidate of each bag. Places without a
      candidate do not count. Candidates have the weight of their example in `batch.weight`, and padding has weight 0.

    Raises:
      ValueError: from loss_fn, if the batch has no label, or one that does not fit the tasks, or if a bag has more
        than C candidates. If no value can be read (under `jit`), the loss of such a bag is NaN.

    Example:
      >>> import torch, funcrec as fr
      >>> feature = lambda name: fr.FeatureConfig(name, table="item", pooling="none", max_length=8)
      >>> model = fr.models.hstu_ranker([fr.TableConfig("item", 100, 16)], history=[feature("seen")],
      ...     candidates=[feature("next")])
      >>> ids = fr.KeyedJaggedTensor.from_lists({"seen": [[1, 2], [3]], "next": [[4], [5, 6]]})
      >>> batch = fr.Batch(ids, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
      >>> loss, aux = fr.models.ranker_loss(model)(model.init(fr.key(0)), batch, key=fr.key(1))
      >>> loss.shape, aux["weight"]  # three candidates, and padding
      (torch.Size([]), tensor([1., 1., 1., 0., 0., 0.]))
      >>> step = fr.train_step(fr.models.ranker_loss(model), sparse=fr.optim.adam(0.01), has_aux=True)
    """
    count = model.num_tasks
    together = all_losses.multi_task(list(losses) * (count if len(losses) == 1 else 1), weights=weights)

    def loss_fn(params: Params, batch: Batch, *, key: Tensor | None = None):
        key = random.check_key("funcrec.models.ranker_loss", key)
        logits = model.train_apply(params, batch, key)
        label, weight = labels_of(batch, logits, count)
        value = together(logits.values, label, weight)
        return value, {"logits": logits.values, "label": label, "weight": weight, "stats": {}}

    return loss_fn


def labels_of(batch: Batch, candidates: JaggedTensor, num_tasks: int) -> tuple[Tensor, Tensor]:
    """Return the labels f[M, T] and the weights f[M] of the candidates."""
    call, label = "funcrec.models.ranker_loss", batch.label
    shape = (candidates.num_bags, "C") if num_tasks == 1 else (candidates.num_bags, "C", num_tasks)
    if label is None or label.dim() not in (len(shape), 3) or label.shape[0] != shape[0]:
        got = "None" if label is None else f"{list(label.shape)}"
        fail(call, "`batch.label` does not match the candidates.", got=got, need=f"f[{', '.join(map(str, shape))}]")
    label = label[:, :, None] if label.dim() == 2 else label
    if label.shape[2] != num_tasks:
        fail(call, "`batch.label` does not match the tasks.", got=f"{list(label.shape)}", need=f"{num_tasks} tasks")
    check(call, count_problems(candidates, label.shape[1]))
    label = label if label.is_floating_point() else label.to(torch.float32)
    bag = candidates.bag_ids()
    inside = bag < candidates.num_bags
    own = torch.where(inside, bag, 0)
    place = torch.arange(candidates.capacity, device=bag.device) - by_bag(candidates.offsets[:-1], candidates)
    most = label.shape[1]
    flat = torch.cat([label.flatten(0, 1), label.new_full((1, num_tasks), torch.nan)])
    found = flat.index_select(0, torch.where(inside & (place < most), own * most + place, flat.shape[0] - 1))
    given = torch.ones_like(inside, dtype=torch.float32) if batch.weight is None else by_bag(batch.weight, candidates)
    weight = torch.where(inside, given, 0)
    return torch.where(inside[:, None], found, 0), weight


# -- the passes ----------------------------------------------------------------------------------------------------


def _apply(columns: Columns, layers: Layers, params: Params, batch: Batch) -> JaggedTensor:
    _check(columns, params, batch, "apply", columns.action, columns.time)
    through = lambda i, layer, own, x, times, lengths: layer.apply(own, x, times, lengths)
    return _whole(columns, layers, params, batch, lambda x: x, through)


def _train_apply(
    columns: Columns, layers: Layers, params: Params, batch: Batch, key: Tensor, input_dropout: float
) -> JaggedTensor:
    _check(columns, params, batch, "train_apply", columns.action, columns.time)
    random.check_key(f"{CALL}.train_apply", key)
    keys = random.split(key, len(layers.hstu) + 1)
    drop = lambda x: replace(x, values=nn.dropout(x.values, keys[-1], input_dropout))
    through = lambda i, layer, own, x, times, lengths: layer.train_apply(own, x, keys[i], times, lengths)[0]
    return _whole(columns, layers, params, batch, drop, through)


def _whole(columns, layers: Layers, params: Params, batch: Batch, drop: Callable, through: Callable) -> JaggedTensor:
    """Return the logits of the candidates from one sequence of context, history and candidates for each bag."""
    before = _before(columns, layers, params, batch)
    candidates, item = candidates_of(columns, layers, params, batch)
    x, lengths = joined_bags([before.x, candidates.x]), candidates.x.lengths
    starts = x.offsets[1:] - lengths
    times = None if before.times is None else _join(before, candidates)
    x = drop(x)
    for i, (layer, own) in enumerate(zip(layers.hstu, part(params.dense, "hstu"), strict=True)):
        x = through(i, layer, own, x, times, lengths)
    y = take_ranges(x.values, None, starts, lengths, candidates.x.capacity)
    return _logits(layers, params, y, item, [before.fits, candidates.fits])


def _encode(columns: Columns, layers: Layers, params: Params, batch: Batch) -> History:
    _check(columns, params, batch, "encode_history", columns.action, columns.time)
    before = _before(columns, layers, params, batch)
    x, kept = before.x, []
    for layer, own in zip(layers.hstu, part(params.dense, "hstu"), strict=True):
        x, one = layer.keep(own, x, before.times)
        kept.append(one)
    lengths = x.lengths.clamp(max=1)
    last = take_ranges(x.values, None, x.offsets[1:] - lengths, lengths, x.num_bags)
    normed = layers.norm.apply(part(params.dense, "norm"), last.to_padded(1)[:, 0])
    return History(kept, torch.where(lengths[:, None] > 0, normed, 0), before.fits)


def _score(columns: Columns, layers: Layers, params: Params, history: History, batch: Batch) -> JaggedTensor:
    hint = "history=model.encode_history(params, batch)"
    check(f"{CALL}.score", (p._replace(hint=hint) for p in HISTORY.find("history", history)))
    _check(columns, params, batch, "score")
    check(f"{CALL}.score", kept_problems(history.layers, len(layers.hstu), batch.ids.num_bags))
    candidates, item = candidates_of(columns, layers, params, batch)
    x, lengths = candidates.x, candidates.x.lengths
    for layer, own, kept in zip(layers.hstu, part(params.dense, "hstu"), history.layers, strict=True):
        x = layer.apply(own, x, candidates.times, lengths, kept)
    return _logits(layers, params, x, item, [history.fits, candidates.fits])


def _query(columns: Columns, layers: Layers, params: Params, batch: Batch) -> Tensor:
    history = _encode(columns, layers, params, batch)
    last = sure(history.last)
    return last if history.fits is None else torch.where(history.fits[:, None], last, torch.nan)


def _before(columns: Columns, layers: Layers, params: Params, batch: Batch) -> Positions:
    """Return the positions of context and history. The context has the time of the history's first position."""
    history, context = history_of(columns, layers, params, batch), context_of(columns, layers, params, batch)
    if context is None:
        return history
    times = None
    if history.times is not None:
        first = by_bag(first_times(history.times, history.x), context)
        times = joined_bags([replace(context, values=first), replace(history.x, values=history.times)]).values
    return Positions(joined_bags([context, history.x]), times, history.fits)


def _join(before: Positions, candidates: Positions) -> Tensor:
    return joined_bags([replace(p.x, values=p.times) for p in (before, candidates)]).values


def _logits(layers: Layers, params: Params, y: JaggedTensor, item: Tensor, fits: list) -> JaggedTensor:
    """Return the logits of candidates from their outputs f[M, D], NaN in bags whose columns do not fit each other."""
    normed = layers.norm.apply(part(params.dense, "norm"), y.values)
    z = layers.head.apply(part(params.dense, "head"), normed * item)
    for own in fits:
        z = z if own is None else torch.where(by_bag(~own, y)[:, None], torch.nan, z)
    return JaggedTensor(z, y.offsets)


def _check(columns: Columns, params: Params, batch: Batch, name: str, *names: str | None) -> None:
    check(f"{CALL}.{name}", input_problems(params, batch, 0))
    asked = () if name == "encode_history" else (columns.query_time,)
    check(f"{CALL}.{name}", column_problems(batch, [*names, *asked]))
