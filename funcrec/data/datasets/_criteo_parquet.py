"""Click logs in Parquet with Criteo's columns: a preset of `stream` and `examples`.

columns int_0, int_1, ... -> dense;   cat_0, cat_1, ... -> ids, one or a list of them
"""

from collections.abc import Iterator, Sequence

from funcrec.core import Count, Problem, Size, check, replace, twice_problems, typed
from funcrec.data._examples import examples_of, missing_problems, whole
from funcrec.data._stream_loader import to_batch
from funcrec.data.datasets._criteo import Transform, transform_dense
from funcrec.data.readers._columns import is_list, type_problems, value_kind
from funcrec.data.readers._files import opened
from funcrec.data.readers._rows import Vocabularies, vocabulary_problems
from funcrec.data.readers._schema import Schema
from funcrec.data.readers._stream import tables
from funcrec.tables import Batch

CALL = "funcrec.data.criteo_parquet"


@typed
def criteo_parquet(
    path: object,
    batch_size: Count,
    *,
    label: str = "label",
    dense: Sequence[str] | None = None,
    sparse: Sequence[str] | None = None,
    transform: Transform = None,
    missing: int | None = None,
    bucket: bool = False,
    skip: Size = 0,
    drop_last: bool = False,
    vocabularies: Vocabularies = None,
) -> Iterator[Batch]:
    """Read batches of Parquet files with Criteo's names: a preset of `stream` and `examples`, which read any.

    Args:
      path: a file, files or a folder.
      label: the column of labels, numbers in [0, 1].
      dense: columns of numbers; those named int_... if None. A missing number counts as 0. There may be none.
      sparse: columns of integers or of lists of integers, the keys of the batch; all cat_... if None. If a table
        has fewer rows than there are ids, its features need a hash.
      transform: see `transform_dense`.
      missing: the id of a missing integer; without it one is an error. A missing list is an empty bag.
      bucket: pad the ids by `fr.pad_to_bucket`, since with lists batches differ in their number of ids.
      skip, drop_last, vocabularies: as in `criteo_tsv`.

    Returns:
      batches with ids i64, without padding unless `bucket` is set.

    Raises:
      TypeError, ValueError, FileNotFoundError: at the call.
      ModuleNotFoundError: pyarrow is missing.
      ValueError: while reading; names file, column and row, or the damage.
    """
    types = opened(CALL, path, None, "parquet").schema
    begins = lambda start: [n for n in types.names if n.startswith(start)]
    dense, sparse = (begins(n) if given is None else list(given) for n, given in (("int_", dense), ("cat_", sparse)))
    named = [label, *dense, *sparse]
    check(CALL, _name_problems(named, sparse), missing_problems(missing))
    source = opened(CALL, path, named, "parquet")
    lists = {n for n in sparse if is_list(value_kind(source.schema.field(n).type))}
    single = tuple(n for n in sparse if n not in lists)
    schema = Schema(label, tuple(dense), single, tuple(n for n in sparse if n in lists))
    check(CALL, type_problems(source.schema, schema), vocabulary_problems(vocabularies, sparse))

    def encode(table) -> Batch:
        batch = whole(examples_of(CALL, table, schema, vocabularies or {}, missing, 0))
        ids = batch.ids if list(schema.keys) == sparse else batch.ids.permute(sparse)
        return replace(batch, ids=ids, dense=None if batch.dense is None else transform_dense(batch.dense, transform))

    numbered = tables(CALL, source, batch_size, skip=skip, drop_last=drop_last)
    return (to_batch(source, encode, rows, table, bucket) for rows, table in numbered)


def _name_problems(named: list[str], sparse: list[str]) -> Iterator[Problem]:
    hint = "label=, dense= and sparse= name the columns"
    if not sparse:
        yield Problem("there is no column of ids.", f"{named}", "columns cat_0, cat_1, ...", hint)
    yield from twice_problems("columns are named twice.", named, hint)
