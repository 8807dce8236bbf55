"""Click logs in Parquet with Criteo's columns: a preset of `stream` and `examples`.

columns int_0, int_1, ... -> dense;   cat_0, cat_1, ... -> ids, one id or a list of ids
"""

from collections.abc import Iterator, Sequence

from funcrec.core import Count, Problem, Size, check, replace, twice_problems, typed
from funcrec.data._examples import MissingId, examples_of, whole
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
    missing: MissingId | None = None,
    bucket: bool = False,
    skip: Size = 0,
    drop_last: bool = False,
    vocabularies: Vocabularies = None,
) -> Iterator[Batch]:
    """Return an iterator over batches of Parquet files whose columns have Criteo's names.

    It is a preset of `stream` and `examples`, which read files with any names.

    Args:
      path: a file, a list of files or a folder.
      label: the column of labels, numbers in [0, 1].
      dense: the columns of numbers. None reads all columns whose name begins with int_, if there are any. A missing
        number counts as 0.
      sparse: the columns of integers or of lists of integers, which become the keys of the batch. None reads all
        columns whose name begins with cat_. If a table has fewer rows than there are ids, its features need a hash.
      transform: see `transform_dense`.
      missing: the id that replaces a missing integer. Without it, a missing integer is an error. A missing list is an
        empty bag.
      bucket: pad the ids by `fr.pad_to_bucket`, because with lists batches differ in their number of ids.
      skip, drop_last, vocabularies: as in `criteo_tsv`.

    Returns:
      batches with ids i64, without padding unless `bucket` is set.

    Raises:
      TypeError, ValueError, FileNotFoundError: an argument does not fit, or a file is missing. The call raises it.
      ModuleNotFoundError: pyarrow is missing.
      ValueError: a value or a file cannot be read. The iterator raises it, and it names the file, the column and the
        row, or the damage.
    """
    types = opened(CALL, path, None, "parquet").schema
    begins = lambda start: [n for n in types.names if n.startswith(start)]
    dense, sparse = (begins(n) if given is None else list(given) for n, given in (("int_", dense), ("cat_", sparse)))
    named = [label, *dense, *sparse]
    check(CALL, _name_problems(named, sparse))
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
