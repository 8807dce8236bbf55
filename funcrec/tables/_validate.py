"""validate: checks that read values, and so wait for the device."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from funcrec.core import CheckError, Problem, check, describe
from funcrec.jagged import KeyedJaggedTensor, check_ids, offset_value_problems
from funcrec.tables._configs import FeatureConfig, TableConfig
from funcrec.tables._kinds import table_shapes
from funcrec.tables._params import Batch
from funcrec.tables._problems import (
    feature_key_problems,
    feature_list_problems,
    feature_table_problems,
    table_tensor_problems,
)

SHOWN_MAX = 3  # offenders named per feature


Ids = TypeVar("Ids")


def validate(
    ids: Ids,
    features: Sequence[FeatureConfig],
    tables: Mapping[str, Tensor] | Sequence[TableConfig],
) -> Ids:
    """The same ids, after a look at every value: offsets ascend, bags keep `max_length`, ids are rows of their table.

    Args:
      ids: a KeyedJaggedTensor, or a Batch: its labels are then looked at
        as well, numbers in [0, 1], and its dense inputs, finite.

    Raises: CheckError that names feature, bag and id, or the label; reads the values on the host.

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
    call, found = "funcrec.validate", ids.ids if isinstance(ids, Batch) else ids
    check_ids(call, found, "ids.ids" if isinstance(ids, Batch) else "ids")
    check(call, feature_list_problems(features), table_tensor_problems(tables))
    check(call, feature_table_problems(features, tables), feature_key_problems(features, found))
    labels = batch_value_problems(ids) if isinstance(ids, Batch) else ()
    check(call, value_problems(found, features, table_shapes(tables)), labels)
    return ids


def batch_value_problems(batch: Batch) -> Iterator[Problem]:
    label = batch.label
    if not isinstance(label, Tensor) or label.dim() != 1:
        yield Problem("`batch.label` is not a vector.", describe(label), "f[B]", kind=TypeError)
    else:
        yield from label_value_problems(label, "batch.label", CheckError)
        keys = batch.ids.keys if batch.ids.strides is None else ()
        if keys and label.shape[0] != batch.ids.num_bags:
            yield Problem(
                "`batch.label` does not match its ids.", describe(label), f"one for each of {batch.ids.num_bags} bags"
            )
    if isinstance(batch.dense, Tensor):
        yield from finite_problems("`batch.dense`", batch.dense)


def label_value_problems(label: Tensor, path: str, kind: type[Exception] = ValueError) -> Iterator[Problem]:
    """The labels of clicks: 0, 1, or a number between, for a chance."""
    wrong = ~((label >= 0) & (label <= 1))
    if bool(wrong.any()):
        at = int(wrong.to(torch.int8).argmax())
        got, need = f"{path}[{at}] = {label[at].item()}, {int(wrong.sum())} in all", "labels in [0, 1]"
        yield Problem(f"`{path}` are not labels of clicks.", got, need, "label >= 4, say, if these are ratings", kind)


def value_problems(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], shapes: Mapping) -> Iterator[Problem]:
    broken = [p._replace(kind=CheckError) for p in offset_value_problems(ids.capacity, ids.offsets, "ids.offsets")]
    yield from broken
    if broken:
        return
    for f in features:
        bounds = ids.offsets_for(f.key)
        first, last = int(bounds[0]), int(bounds[-1])
        values = ids.values[first:last]
        bags = torch.searchsorted(bounds, torch.arange(first, last, device=bounds.device), right=True) - 1
        if f.max_length is not None and bool((bounds.diff() > f.max_length).any()):
            at = int((bounds.diff() > f.max_length).nonzero()[0])
            got, need = f"bag {at} with {int(bounds.diff()[at])} ids", f"at most max_length={f.max_length}"
            yield Problem(
                f"feature {f.name!r} has a bag that is too long.", got, need, "a larger max_length", CheckError
            )
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


def finite_problems(name: str, x: Tensor) -> Iterator[Problem]:
    """x must hold no NaN and no infinity."""
    bad = ~torch.isfinite(x)
    if bool(bad.any()):
        at = bad.nonzero()[0].tolist()
        got = f"{float(x[tuple(at)])} at {at}, {int(bad.sum())} in all"
        yield Problem(f"{name} is not finite.", got, "finite numbers", kind=CheckError)
