"""Looks for ids outside their tables in every batch of a run, in the thread that makes the batch.

bad(batch) = Σ_f |{i in batch.ids[f.key] : not 0 <= i < rows of f.table}|      over features without a hash
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from funcrec.core import CheckError, Problem, check, describe, replace
from funcrec.data import Loader, Position, StreamLoader
from funcrec.jagged import KeyedJaggedTensor, offset_value_problems
from funcrec.loop.pipelines._ready_batches import Ready
from funcrec.tables import Batch, FeatureConfig, Lookup, bounded, table_shapes, value_problems

CALL = "funcrec.fit"
FREE = np.iinfo(np.int64).max  # more rows than any id needs, for ids that no table bounds


class BadIds:
    """Finds ids outside their tables in the batches of a run of `fit`.

    features, shapes: the features that read the batches' ids, and {table: (R, D)}; both are None before the first
      batch.
    found: {position after a batch: the number of its bad ids}, for batches that are made and not yet taken.
    """

    def __init__(self, mode: str | None, model: Any, tables: Any):
        """Take the model, or None, and the tables of the state, which say whose ids may be any numbers."""
        self.mode, self.found = mode, {}
        self.of_model = None if model is None else (tuple(bounded(model.features, tables)), table_shapes(model.tables))
        self.features: Sequence[FeatureConfig] | None = None
        self.shapes: Mapping[str, tuple[int, int]] = {}

    def learn(self, lookups: Sequence[Lookup], batch: Any) -> None:
        """Take features and shapes from the model, or without a model from the loss's lookups of the batch's ids."""
        own = [x for x in lookups if x.ids is ids_of(batch)]
        if self.of_model is not None:
            self.features, self.shapes = self.of_model
            for x in own:
                self.features = tuple(bounded(self.features, x.tables))
        elif self.features is None and own:
            self.features = tuple(dict.fromkeys(f for x in own for f in bounded(x.features, x.tables)))
            self.shapes = {n: shape for x in own for n, shape in table_shapes(x.tables).items()}

    def watching(self, loader: Any) -> Any:
        """Return the loader. A loader of `fr.data` then checks each batch in its own thread."""
        return replace(loader, look=self.note_bad_ids) if isinstance(loader, Loader | StreamLoader) else loader

    def watched(self, loader: Any, items: Iterable) -> Iterator:
        """Return the items.

        The loop checks items as it takes them, if they come from another loader than one of `fr.data`.
        """
        return iter(items) if isinstance(loader, Loader | StreamLoader) else map(self.note_bad_ids, items)

    def note_bad_ids(self, item: Any) -> Any:
        """Return the item (position, batch), and note the number of its bad ids. With "raise", raise for bad ids."""
        if self.features is not None and isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], Position):
            self.found[item[0]] = self.count(*item)
        return item

    def take(self, position: Position, batch: Any) -> int:
        """Return the number of bad ids of a batch that is about to be trained on."""
        found = self.found.pop(position, None)
        return (0 if self.features is None else self.count(position, batch)) if found is None else found

    def count(self, position: Position, batch: Any) -> int:
        ids, features = ids_of(batch), self.features
        if ids is None or features is None or not (bad := outside(ids, features, self.shapes).sum()):
            return 0
        if self.mode != "count":
            one = batch_name(position)
            problems = value_problems(ids, features, self.shapes)
            check(CALL, (p._replace(got=f"{p.got}, in {one}", hint=f"{p.hint}; on_bad_ids='count'") for p in problems))
        return int(bad)

    def cleaned(self, batch: Any) -> Any:
        """Return the batch, with id 0 in place of bad ids in the mode "count".

        So other faults of the batch can be found.
        """
        ids = ids_of(batch)
        if self.mode != "count" or self.features is None or ids is None:
            return batch
        first = int(ids.offsets[0])
        values = ids.values.clone()
        is_bad = outside(ids, self.features, self.shapes) > 0
        values[first : first + len(is_bad)][torch.from_numpy(is_bad).to(values.device)] = 0
        ids = replace(ids, values=values)
        return replace(batch, ids=ids) if isinstance(batch, Batch) else ids


def batch_name(position: Position) -> str:
    """Return a text that names a batch, from the position after it."""
    epoch, number = position.epoch, position.batch - 1
    return f"batch {number} of epoch {epoch}" if number >= 0 else f"the last batch of epoch {epoch - 1}"


def ids_of(batch: Any) -> KeyedJaggedTensor | None:
    """Return the ids of a batch, or of a batch that a pipeline made ready; None if the batch has no ids."""
    own = batch.batch if isinstance(batch, Ready) else batch
    found = own.ids if isinstance(own, Batch) else own
    return found if isinstance(found, KeyedJaggedTensor) else None


def outside(ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], shapes: Mapping) -> np.ndarray:
    """Return for each id the number of features whose table it is outside of, i64[N]; 0 for padding.

    The function reads on the host.
    """
    offsets, values = ids.offsets.detach().cpu().numpy(), ids.values.detach().cpu().numpy()
    ends = [0, *(ids.bag_range(key)[1] for key in ids.keys)]
    bounds = offsets[ends]
    lengths = np.diff(bounds)
    if (lengths < 0).any() or bounds[0] != 0 or bounds[-1] > len(values):
        problems = offset_value_problems(ids.capacity, ids.offsets, "batch.ids.offsets")
        check(CALL, (p._replace(kind=CheckError) for p in problems))
    values = values[: bounds[-1]]
    sizes: dict[str, list[int]] = {}
    for f in features:
        if f.hash is None:
            sizes.setdefault(f.key, []).append(shapes[f.table][0])
    found = np.zeros(len(values), np.int64)
    for nth in range(max(map(len, sizes.values()), default=0)):
        rows = [(sizes.get(key, []) + [FREE] * (nth + 1))[nth] for key in ids.keys]
        is_read = np.repeat([key in sizes and nth < len(sizes[key]) for key in ids.keys], lengths)
        found += is_read & ((values < 0) | (values >= np.repeat(rows, lengths)))
    return found


# -- validators --------------------------------------------------------------------------------------------------


def unknown_problems(bad_ids: BadIds, batch: Any) -> Iterator[Problem]:
    """Report an `on_bad_ids` if no feature is known to read the batches' ids."""
    if bad_ids.mode is not None and (bad_ids.features is None or ids_of(batch) is None):
        got = f"on_bad_ids={bad_ids.mode!r}, and {describe(batch)}"
        need = "a model, or the loss of a `train_step` that looks up `batch.ids`"
        yield Problem("`on_bad_ids` knows no lookup of the batches' ids.", got, need, "model=model, or on_bad_ids=None")
