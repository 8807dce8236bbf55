"""`validate`, and other checks that read values and therefore wait for the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from funcrec.core import (
    CheckError,
    Problem,
    check,
    describe,
    element_problems,
    kind_of,
    members_below,
    outside_transforms,
    reported,
)
from funcrec.jagged import KeyedJaggedTensor, check_ids, inverse_value_problems, offset_value_problems
from funcrec.tables._checks import (
    feature_key_problems,
    feature_list_problems,
    feature_table_problems,
    table_tensor_problems,
)
from funcrec.tables._configs import FeatureConfig, TableConfig
from funcrec.tables._kinds import bounded, is_plain, table_shapes
from funcrec.tables._params import Batch, batch_parts, blank_padding

SHOWN_MAX = 3  # ids per feature that a message shows


Ids = TypeVar("Ids")


def validate(
    ids: Ids,
    features: Sequence[FeatureConfig],
    tables: Mapping[str, Tensor] | Sequence[TableConfig],
    *,
    labels: tuple[float, float] = (0.0, 1.0),
) -> Ids:
    """Return the same ids after a check of every value.

    Offsets must ascend, bags must keep `max_length`, and ids must be rows of the feature's table. Weights other than 1
    need a weighted feature that reads them. `validate` reads the values on the host.

    Args:
      ids: a KeyedJaggedTensor or a Batch. In a Batch, the labels must be valid, the dense inputs finite, and the
        weights finite and >= 0. Of an example of weight 0, only the ids are checked.
      labels: the least and the greatest valid label. (0, 1) is the range of clicks; (-inf, inf) allows any numbers.

    Raises:
      CheckError: if a value is wrong. The message names the feature, bag and id, or the label.

    Example:
      >>> import funcrec as fr
      >>> ids = fr.KeyedJaggedTensor.from_lists({"item": [[0], [9]]})
      >>> fr.validate(ids, [fr.FeatureConfig("item", table="item")], [fr.TableConfig("item", 5, 2)])
      Traceback (most recent call last):
      ...
      funcrec.CheckError: funcrec.validate: feature 'item' has ids outside table 'item'.
        got   id 9 in bag 1
        need  0 <= id < 5
        try   hash=fr.modulo() in the feature's config, or a larger table

    Source: TorchRec's validate_keyed_jagged_tensor.
    """
    call, found = "funcrec.validate", cast(Any, ids.ids if isinstance(ids, Batch) else ids)
    check_ids(call, found, "ids.ids" if isinstance(ids, Batch) else "ids")
    check(call, feature_list_problems(features), table_tensor_problems(tables) if is_plain(tables) else ())
    check(call, feature_table_problems(features, tables), feature_key_problems(features, found))
    check(call, bounds_problems(labels))
    rest = batch_value_problems(ids, labels) if isinstance(ids, Batch) else ()
    check(call, value_problems(found, bounded(features, tables), table_shapes(tables)), rest)
    check(call, unread_weight_problems(found, features))
    return ids


def batch_value_problems(batch: Batch, labels: tuple[float, float]) -> Iterator[Problem]:
    label, weight = batch.label, batch.weight
    if (yield from reported(batch_parts(batch, "batch"))) or (yield from reported(batch_shape_problems(batch))):
        return
    if weight is not None:
        yield from weight_value_problems(weight, "batch.weight", CheckError)
    if label is not None:
        yield from label_value_problems(label, "batch.label", CheckError, weight=weight, labels=labels)
    if batch.dense is not None:
        yield from finite_problems("`batch.dense`", blank_padding(batch.dense, weight))


def unread_weight_problems(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig]) -> Iterator[Problem]:
    """Yield a problem for weights other than 1 that no weighted feature reads."""
    for key in dict.fromkeys(f.key for f in features):
        of_key = [f for f in features if f.key == key]
        if ids.weights is None or key in ids.unweighted or any(f.weighted for f in of_key):
            continue
        first, last = (int(ids.offsets_for(key)[i]) for i in (0, -1))
        odd = (ids.weights[first:last] != 1).nonzero()[:, 0].tolist()
        if odd:
            names = [f.name for f in of_key]
            at = first + odd[0]
            got = f"weight {float(ids.weights[at])} of id {int(ids.values[at])}, {len(odd)} in all"
            need = "FeatureConfig(..., weighted=True), or ids without weights of this key"
            hint = f"FeatureConfig({names[0]!r}, table={of_key[0].table!r}, weighted=True)"
            yield Problem(f"weights of ids of {key!r} are read by no feature: {names}.", got, need, hint, CheckError)


def batch_shape_problems(batch: Batch) -> Iterator[Problem]:
    is_form = {"label": lambda x: x.dim() == 1 or (x.dim() == 2 and x.shape[1] > 1), "dense": lambda x: x.dim() == 2}
    needs = {"label": "f[B], or f[B, T] of several tasks", "dense": "f[B, num_dense]", "weight": "f[B]"}
    has_count = batch.ids.keys and (batch.ids.strides is None or batch.ids.inverse is not None)
    count = batch.ids.num_examples if has_count else None
    for name, need in needs.items():
        x = getattr(batch, name)
        if x is not None and not is_form.get(name, lambda x: x.dim() == 1)(x):
            hint = f"{name}.squeeze(1)" if name != "dense" and x.dim() == 2 else ""
            what = f"`batch.{name}` is not a {'matrix' if name == 'dense' else 'vector'}."
            yield Problem(what, describe(x), need, hint, TypeError)
        elif x is not None and count not in (None, x.shape[0]):
            hint, need = "the same rows of the data for both", f"one for each of {count} bags"
            yield Problem(f"`batch.{name}` does not match its ids.", describe(x), need, hint)


def label_value_problems(
    label: Tensor,
    path: str,
    kind: type[Exception] = ValueError,
    *,
    weight: Tensor | None = None,
    labels: tuple[float, float] = (0.0, 1.0),
) -> Iterator[Problem]:
    """Yield a problem unless labels [B] or [B, T] are finite and in the range `labels`.

    The check skips examples of weight 0. (0, 1) is the range of clicks: 0, 1, or a probability in between.
    """
    low, high = labels
    wrong = blank_padding(~((label >= low) & (label <= high) & torch.isfinite(label)), weight)
    what, need, hint = f"`{path}` has labels out of range.", f"finite labels in [{low}, {high}]", ""
    if tuple(labels) == (0, 1):
        other = "; fr.validate(..., labels=(1, 5)) for labels of another range" if kind is CheckError else ""
        what, need = f"`{path}` are not labels of clicks.", "labels in [0, 1]"
        hint = f"label >= 4, say, if these are ratings{other}"
    for problem in element_problems(what, path, label, wrong, need, hint, kind):
        if hint and bool(((label == -1) | (label == 1)).all()):
            problem = problem._replace(hint="(label > 0).float(): -1 is not a label, 0 says that there was no click")
        yield problem


def weight_value_problems(weight: Tensor, path: str, kind: type[Exception] = ValueError) -> Iterator[Problem]:
    """Yield a problem unless the weights f[B] of examples are finite and >= 0."""
    wrong = ~((weight >= 0) & (weight < torch.inf))
    what, hint = f"`{path}` has numbers that are not weights.", "0 for an example that is not to count"
    yield from element_problems(what, path, weight, wrong, "finite weights >= 0", hint, kind)


def bounds_problems(labels: Any) -> Iterator[Problem]:
    """Yield a problem unless `labels` is (least, greatest), two numbers."""
    need, hint = "(least, greatest), two numbers", "labels=(0, 1), or (-math.inf, math.inf) for any"
    found = (p._replace(hint=hint) for p in kind_of(tuple[float, float]).find("labels", labels))
    if not (yield from reported(found)) and not labels[0] <= labels[1]:
        yield Problem("`labels` is not a range.", f"{tuple(labels)}", need, hint)


def value_problems(
    ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], shapes: Mapping[Any, Any]
) -> Iterator[Problem]:
    broken = [p._replace(kind=CheckError) for p in offset_value_problems(ids.capacity, ids.offsets, "ids.offsets")]
    yield from broken
    if broken:
        return
    yield from inverse_value_problems(ids, kind=CheckError)
    for f in features:
        bounds = ids.offsets_for(f.key)
        first, last = int(bounds[0]), int(bounds[-1])
        values = ids.values[first:last]
        bags = torch.searchsorted(bounds, torch.arange(first, last, device=bounds.device), right=True) - 1
        if f.max_length is not None and bool((bounds.diff() > f.max_length).any()):
            at = int((bounds.diff() > f.max_length).nonzero()[0])
            got, need = f"bag {at} with {int(bounds.diff()[at])} ids", f"at most max_length={f.max_length}"
            hint = "a larger max_length"
            yield Problem(f"feature {f.name!r} has a bag that is too long.", got, need, hint, CheckError)
        size = shapes[f.table][0]
        outside = ((values < 0) | (values >= size)).nonzero()[:, 0].tolist() if f.hash is None else []
        if outside:
            shown = ", ".join(f"id {int(values[i])} in bag {int(bags[i])}" for i in outside[:SHOWN_MAX])
            more = f" and {len(outside) - SHOWN_MAX} more" if len(outside) > SHOWN_MAX else ""
            yield Problem(
                f"feature {f.name!r} has ids outside table {f.table!r}.",
                shown + more,
                f"0 <= id < {size}",
                "hash=fr.modulo() in the feature's config, or a larger table",
                CheckError,
            )


def check_values(call: str, find: Callable[..., Iterator[Problem]], *trees: Any) -> None:
    """Raise the problems that find(*trees) yields for each member of a vmap.

    The ranks of an emulated mesh are members of a vmap.
    """
    with outside_transforms():
        for place, mine in members_below(trees):
            where = f", in member {place[0] if len(place) == 1 else place} of a vmap or a mesh" if place else ""
            check(call, (p._replace(got=p.got + where) for p in find(*mine)))


def room_problems(overflows: Sequence[Tensor]) -> Iterator[Problem]:
    """Yield a problem if ids found no place in an exchange with a capacity. Results without these ids are NaN."""
    lost, needed = sum(int(x[0]) for x in overflows), max((int(x[1]) for x in overflows), default=0)
    if lost:
        got, hint = f"{lost} ids without a place", f"capacity={needed}, or None; a step of `train_step` counts them"
        yield Problem("the tables' `capacity` is too small.", got, f"at least {needed}", hint, CheckError)


def finite_problems(name: str, x: Tensor) -> Iterator[Problem]:
    """Yield a problem if x holds NaN or infinity."""
    bad = ~torch.isfinite(x)
    if bool(bad.any()):
        at = bad.nonzero()[0].tolist()
        got = f"{float(x[tuple(at)])} at {at}, {int(bad.sum())} in all"
        yield Problem(f"{name} is not finite.", got, "finite numbers", kind=CheckError)
