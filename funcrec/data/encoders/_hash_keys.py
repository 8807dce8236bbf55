"""hash_keys: ids for keys that are text, such as the names of users, for vocabularies that take any id.

id(key) = a hash of 64 bits of the key's bytes; of n different keys n (n - 1) / 2⁶⁵ pairs share an id on average
"""

from typing import Any

import torch
from torch import Tensor

from funcrec.core import typed
from funcrec.data.encoders._encoders import Place, as_column, elements
from funcrec.data.encoders._vocabulary import of_kind, text_bits

PLACE = Place("funcrec.data.hash_keys", "column")


@typed
def hash_keys(column: Any) -> Tensor:
    """Return an id for each key of a column of text or bytes, i64[N].

    `fr.vocabulary` takes such ids as they are, and so does `KeyedJaggedTensor`.

    Args:
      column: N texts or bytes: a list, or a column of pyarrow, pandas or polars. None of them is missing.

    Raises:
      TypeError: the column holds lists, or values that are neither text nor bytes. Integers are ids already.
      ValueError: a key is missing.

    Law: a key has the same id in every process, on every machine and in every column. Of a million different keys two
      share an id with a chance of 3e-8, of a thousand million with 0.03. The hash does not withstand keys that
      somebody chooses in order to collide.

    Example:
      >>> from funcrec.data import hash_keys
      >>> hash_keys(["anna", "bob", "anna"])
      tensor([-1180343110714212839, -3498382319608536230, -1180343110714212839])
    """
    values, _, lengths = elements(as_column(PLACE.call, column), PLACE)
    if lengths is not None:
        PLACE.refuse_type("lists", "one text a row", "hash_keys of the lists' values, with their lengths for the bags")
    kind, values = of_kind(values, PLACE)
    if values.null_count:
        PLACE.refuse(
            int(values.is_null().to_numpy().argmax()), "a missing key", "text or bytes", "column.fill_null('')"
        )
    if not len(values):
        return torch.zeros(0, dtype=torch.int64)
    if kind not in ("text", "bytes"):
        PLACE.refuse_type(values.type, "text or bytes", "the integers themselves, which are ids already")
    coded = values.combine_chunks().dictionary_encode()
    return text_bits(coded.dictionary)[torch.from_numpy(coded.indices.to_numpy().astype("int64"))]
