"""Tables from what people have: anything with Arrow's PyCapsule interface, or a dict of columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from funcrec.core import describe, fail
from funcrec.data._arrow import need_pyarrow

NEED = "a pandas, polars or pyarrow table, a dict of columns, or a path"


def as_table(call: str, source: Any, names: Sequence[str] | None):
    """A source in memory -> pyarrow.Table of the columns `names`, those it has of them; None for all."""
    pa = need_pyarrow(call)
    try:
        if isinstance(source, pa.Table):
            table = source
        elif hasattr(source, "__arrow_c_stream__") or isinstance(source, pa.RecordBatch):
            table = pa.table(source) if not isinstance(source, pa.RecordBatch) else pa.Table.from_batches([source])
        elif hasattr(source, "__arrow_c_array__"):
            table = pa.Table.from_batches([pa.record_batch(source)])
        elif isinstance(source, Mapping):
            table = pa.table({str(n): _column(call, n, x) for n, x in source.items() if names is None or n in names})
        else:
            hint = '{"item": [1, 2]}'
            fail(call, "`table` is not a table.", got=describe(source), need=NEED, hint=hint, kind=TypeError)
    except pa.ArrowException as error:
        fail(call, "`table` is not a table of columns of one length.", got=str(error)[:120], need=NEED)
    return table if names is None else table.select([i for i, n in enumerate(table.column_names) if n in names])


def _column(call: str, name: str, x: Any):
    """One column of a dict: a list, an array of any library, a tensor."""
    import pyarrow as pa

    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().numpy()
    try:
        return x if isinstance(x, pa.Array | pa.ChunkedArray) else pa.array(x)
    except (pa.ArrowException, TypeError, OverflowError, ValueError) as error:
        need = "values of one kind: numbers, strings, lists of them; None where one is missing"
        fail(call, f"column `{name}` cannot be read.", got=str(error)[:120], need=need, kind=TypeError)
