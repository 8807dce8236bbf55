"""How lookups read quantised tables: rows are decoded where they are summed, and no table is written out.

    acts[b, f] = Σ_{i in bag (f, b)} s_i · (codes[row_i] · scale[row_i] + bias[row_i])

Shapes: B bags, F features, N ids, D dim.
"""

from collections.abc import Sequence
from typing import Any

from funcrec.jagged import KeyedJaggedTensor
from funcrec.kernels import ops
from funcrec.tables import (
    FeatureConfig,
    LookupResult,
    lookup_forms,
    num_bags_of,
    pooled_read,
    read_weights,
    sequences_read,
)


def read_quantized(
    tables: Any, ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], implementation: str | None = None
) -> LookupResult:
    """What a lookup gives of QuantizedTables; `features` are all pooled, or all sequences."""
    forms = {n: (bits, dim) for n, bits, dim in tables.forms}
    shapes = {n: (t.shape[0], forms[n][1]) for n, t in tables.items()}
    if features[0].pooling == "none":
        gather = lambda n, rows: ops.quantized_rows(tables[n], rows, *forms[n], implementation=implementation)
        return sequences_read(gather, ids, features, shapes)
    names, buffers, told = lookup_forms(ids, features, shapes)
    values = ops.quantized_lookup(
        [tables[n] for n in names], buffers, ids.offsets, read_weights(ids, features), told, num_bags_of(ids, features),
        [forms[n][0] for n in names], [forms[n][1] for n in names], implementation=implementation,
    )  # fmt: skip
    return pooled_read(values, ids, features, shapes)
