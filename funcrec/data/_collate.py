"""Batches for torch.utils.data: the function with which a DataLoader makes batches inside its processes."""

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral
from typing import Any

import torch

from funcrec.core import describe, fail
from funcrec.data._examples import examples, whole
from funcrec.data._loader import RowData, is_row_data, take
from funcrec.data.encoders._encoding import Encoding, encode
from funcrec.data.readers._schema import Schema
from funcrec.tables import Batch


def collate(source: RowData | Schema | Encoding) -> Callable[[list[Any]], Batch]:
    """Return the `collate_fn` of a torch.utils.data.DataLoader, to use the DataLoader's processes and samplers.

    Args:
      source: either data with `num_rows` and `take`, or an Encoding, or a Schema of integer ids. With data, the dataset
        has row numbers as its items: range(data.num_rows) or rows.tolist(). One `take` then makes a batch. With an
        Encoding or a Schema, the dataset has dicts {column: value} as its items.

    Returns:
      a function of a list of items that returns a `fr.Batch`. The function can be pickled if `source` can.

    Law: a batch equals take(data, rows), or the examples of a table made from the dicts.

    Example:
      >>> import torch, funcrec as fr
      >>> from funcrec.data import collate, random_rows
      >>> data = random_rows(fr.key(0), {"item": 100}, num_rows=10)
      >>> load = torch.utils.data.DataLoader(range(10), batch_size=4, shuffle=True, collate_fn=collate(data))
      >>> [batch.label.shape[0] for batch in load]
      [4, 4, 2]
    """
    if not is_row_data(source) and not isinstance(source, Schema | Encoding):
        got, need = describe(source), "data with `num_rows` and `take`, a Schema or an Encoding"
        hint = "collate(fr.data.random_rows(fr.key(0), {'item': 100}, num_rows=50))"
        fail("funcrec.data.collate", "`source` does not make batches.", got=got, need=need, hint=hint, kind=TypeError)
    return partial(_batch_of, source)


def _batch_of(source: RowData | Schema | Encoding, items: list) -> Batch:
    call = "funcrec.data.collate"
    if not isinstance(items, list | tuple) or not items:
        hint = "DataLoader(..., collate_fn=collate(data))"
        fail(call, "the items are not a batch.", got=describe(items), need="a list of items", hint=hint, kind=TypeError)
    if not isinstance(source, Schema | Encoding):
        if not all(isinstance(i, Integral) and not isinstance(i, bool) for i in items):
            got, need = f"a list of {', '.join(sorted({type(i).__name__ for i in items}))}", "row numbers"
            hint = "DataLoader(range(data.num_rows), ..., collate_fn=collate(data))"
            fail(call, "the items are not rows of the data.", got=got, need=need, hint=hint, kind=TypeError)
        return take(source, torch.tensor(items, dtype=torch.int64))
    if not all(isinstance(x, Mapping) and x.keys() == items[0].keys() for x in items):
        got, need = f"{[type(x).__name__ for x in items[:3]]}", "dicts of the same columns"
        hint = 'a dataset whose items are {"item": 3, "click": 1.0}'
        fail(call, "the items are not examples.", got=got, need=need, hint=hint, kind=TypeError)
    value = lambda x: x.tolist() if hasattr(x, "tolist") else x
    table = {name: [value(x[name]) for x in items] for name in items[0]}
    return whole(encode(source, table) if isinstance(source, Encoding) else examples(table, source))
