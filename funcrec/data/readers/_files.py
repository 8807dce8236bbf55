"""Sources from files of text and Parquet, in folders and hive partitions.

root/day=3/part.parquet -> the rows of part.parquet, with a column day = 3

pyarrow reads the files. It verifies Parquet pages that have a checksum, and holds a few blocks at a time.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

from funcrec.core import Problem, Within, check, describe, fail, nearest, typed_fields
from funcrec.data.readers._arrow import PACKED, at_once, compute, files_below, need_pyarrow, parquet_of, text_of
from funcrec.data.readers._columns import first_true, plain
from funcrec.data.readers._sources import NEED, Part, Source, Wanted, absent_problems, as_table, wanted_names
from funcrec.data.readers._text_faults import (
    check_floats,
    check_quotes,
    check_text,
    ends_in_a_line_break,
    is_fraction,
    is_utf16,
    last_column,
)
from funcrec.files import Url, path_or_url, raise_of_store

BLOCK_BYTES, BLOCK_ROWS, PIECE_ROWS = 8 << 20, 1 << 16, 1 << 13
LOOKED_AT = 16  # the most files that are read to find the types of empty columns
NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@typed_fields
class Text(NamedTuple):
    """A format of text with one row per line.

    An empty field is a missing value. `""` is an empty string. An empty line is a row of missing values.

    Args:
      delimiter: the character between two fields.
      names: the names of the columns, if the first line does not hold them.
      types: {column: its type}, a type of pyarrow or its name ("string", "int64"). Other types are inferred from the
        first eight megabytes of the first file that has values. A column without values has strings.
      nulls: fields that count as missing values.
      quotes: whether fields may stand in double quotes. Such fields may contain line breaks. After a line break in a
        field, errors count rows instead of lines.

    Example:
      >>> from funcrec.data import Text
      >>> Text("|", names=["user", "item"], types={"user": "string"}).delimiter
      '|'
    """

    delimiter: Annotated[str, Within("one character", lambda s: len(s) == 1, "is not one character")] = ","
    names: Sequence[str] | None = None
    types: Mapping[str, Any] = {}
    nulls: Sequence[str] = ("",)
    quotes: bool = True


Format = Literal["csv", "tsv", "parquet"] | Text | None
SUFFIXES = {".csv": Text(), ".tsv": Text("\t"), ".tab": Text("\t"), ".parquet": "parquet", ".pq": "parquet"}


def opened(call: str, source: Any, wanted: Wanted, form: Format = None) -> Source:
    """Return the source with its schema. No row of a file is read, except one block of text to infer types."""
    need_pyarrow(call)
    if not is_path(source) and (not isinstance(source, Sequence) or isinstance(source, bytes)):
        table = as_table(call, source, wanted)
        pieces = [(i, table.slice(i, PIECE_ROWS)) for i in range(0, table.num_rows, PIECE_ROWS)]
        parts = [Part("", "row", i, t.num_rows, lambda t=t: iter(t.to_batches())) for i, t in pieces]
        return Source(table.schema, parts, "the table")
    files = _files(call, source)
    text = _format_of(call, files, form)
    return _text_parts(call, files, wanted, text) if isinstance(text, Text) else _parquet_parts(call, files, wanted)


def is_path(x: object) -> bool:
    return isinstance(x, str | os.PathLike)


def _files(call: str, source: Any) -> list[tuple[Path | Url, dict[str, str | None]]]:
    """Return (path, its hive partitions) of each file. Names in folders that begin with . or _ are skipped."""
    several = not is_path(source)
    if several and not (len(source) and all(map(is_path, source))):
        what, hint = "the source is not a table.", 'source="day_0.tsv", or {"item": [1, 2]}'
        fail(call, what, got=describe(source), need=NEED, hint=hint, kind=TypeError)
    files: list[tuple[Path | Url, dict]] = []
    for root in [path_or_url(call, p) for p in (source if several else [source])]:
        root = root if isinstance(root, Url) else root.expanduser()
        if root.is_file():
            files.append((root, _partitions(root.parent, ())))
        elif root.is_dir():
            inside = [(p, p.parts[len(root.parts) :]) for p in files_below(root)]
            seen = [(p, own) for p, own in inside if not any(part.startswith((".", "_")) for part in own)]
            files += [(p, _partitions(root, own[:-1])) for p, own in seen]
        else:
            got, hint = f"{str(root)!r}", "a path from the working directory, or an absolute path"
            hint = "another URL" if isinstance(root, Url) else hint
            fail(call, "there is no such file.", got=got, need="a file or a folder", hint=hint, kind=FileNotFoundError)
    if not files:
        fail(call, "there is no file in the folder.", got=f"{str(source)!r}", need="files of text or Parquet")
    return files


def _partitions(root: Path | Url, inside: Sequence[str]) -> dict[str, str | None]:
    """Return {"day": "1", "hour": "2"} for data/day=1 and ("hour=2",).

    The pairs come from the folders inside the root and from those at the end of its path."""
    own = root.parts if isinstance(root, Url) else root.absolute().parts
    above = reversed([*takewhile(lambda name: "=" in name, reversed(own))])
    pairs = (unquote(part).split("=", 1) for part in (*above, *inside) if "=" in part)
    return {name: None if value == NO_PARTITION else value for name, value in pairs}


def _format_of(call: str, files: list, form: Format) -> str | Text:
    """Return the one format of all files: the given format, or the format that the suffixes of the names state."""
    if isinstance(form, Text) or form == "parquet":
        return form
    if form is not None:
        return SUFFIXES[f".{form}"]
    ends = {}
    for path, _ in files:
        name = path.name.lower()
        for packed in PACKED:
            name = name.removesuffix(packed)
        ends[Path(name).suffix] = path.name
    if len(ends) > 1 or next(iter(ends)) not in SUFFIXES:
        need = f"one of {list(SUFFIXES)} at the end of each"
        what = f"the file names {'show two formats' if len(ends) > 1 else 'do not show the format'}."
        hint = 'format="csv", "tsv", "parquet" or Text(...), the same for all'
        fail(call, what, got=f"{sorted(ends.values())[:3]}", need=need, hint=hint)
    return SUFFIXES[next(iter(ends))]


def _with_partitions(call: str, schema, files: list, wanted: Wanted, name: str):
    """Return (schema of the columns that are read, names of the columns that come from the names of folders)."""
    import pyarrow as pa

    own: dict[str, list] = {}
    for _, partitions in files:
        for key, value in partitions.items():
            own.setdefault(key, []).append(value)
    kinds = {k: pa.int64() if all(v is None or _is_int(v) for v in own[k]) else pa.string() for k in own}
    extra = [pa.field(k, kind) for k, kind in kinds.items() if k not in schema.names]
    check(call, absent_problems(name, [*schema.names, *(f.name for f in extra)], wanted))
    columns = wanted_names(wanted)
    whole = pa.schema([*schema, *extra])
    chosen = whole if columns is None else pa.schema([whole.field(n) for n in columns])
    return chosen, {f.name for f in extra}


def _is_int(text: str) -> bool:
    return re.fullmatch(r"0|-?[1-9]\d{0,17}", text) is not None


def _filled(call: str, file: str, chunk, schema, partitions: dict, extra: set[str]):
    """Return a record batch of a file in the schema of the source.

    Its columns are in order, cast to their types, and include the partitions."""
    import pyarrow as pa

    of = lambda f: pa.repeat(pa.scalar(_value(partitions.get(f.name), f.type), f.type), chunk.num_rows)
    arrays = [of(f) if f.name in extra else chunk.column(f.name) for f in schema]
    for name in partitions.keys() & {f.name for f in schema} - extra:
        _check_folder(call, file, name, chunk.column(name), partitions[name])
    for i, (array, field) in enumerate(zip(arrays, schema, strict=True)):
        try:
            arrays[i] = array if array.type == field.type else array.cast(field.type)
        except pa.ArrowException as error:
            what = f"column `{field.name}` of `{file}` has a value that the type of all files does not hold."
            got, need = f"{array.type}: {error}"[:120], f"values of {field.type}, as which the files are read together"
            fail(call, what, got=got, need=need, hint="files of one type; of ids, text")
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _check_folder(call: str, file: str, name: str, column, text: str | None) -> None:
    """Raise if a column of a file differs from the value that the name of its folder gives for this column."""
    import pyarrow as pa

    pc = compute()
    column = plain(pa.chunked_array([column]))
    try:
        value = pa.scalar(text).cast(column.type)
        equal = column.is_null() if text is None else pc.equal(column, value).fill_null(False)
        at = first_true(pc.invert(equal))
    except pa.ArrowException:
        at = 0 if len(column) else None
    if at is not None:
        what, got = f"`{file}` has a column `{name}` that is not what its folder says.", f"{column[at]} in a row"
        need = f"{name}={NO_PARTITION if text is None else text}, as the folder is called"
        fail(call, what, got=got, need=need, hint="another name for the folder, or for the column")


def _value(text: str | None, kind) -> int | str | None:
    import pyarrow.types as kinds

    return int(text) if text is not None and kinds.is_integer(kind) else text


def _parquet_parts(call: str, files: list, wanted: Wanted) -> Source:
    """Return a source with one part for each row group."""
    import pyarrow as pa
    from pyarrow import parquet

    def meta_of(path: Path | Url):
        try:
            return parquet.read_metadata(parquet_of(path))
        except (pa.ArrowException, OSError) as error:
            raise_of_store(error)
            what = f"`{path.name}` is not a whole parquet file."
            hint = 'format="csv", if it is text; else write it again'
            fail(call, what, got=str(error)[:120], need="a parquet file", hint=hint)

    metas = at_once(meta_of, [path for path, _ in files])
    name = f"`{files[0][0].name}`"
    schema, extra = _with_partitions(call, metas[0].schema.to_arrow_schema(), files, wanted, name)
    schemas = [m.schema.to_arrow_schema() for m in metas]
    schema = _unified(call, files, schema, schemas, extra).remove_metadata()
    own = [f.name for f in schema if f.name not in extra]
    parts = []
    for (path, partitions), meta in zip(files, metas, strict=True):
        first = 0
        for group in range(meta.num_row_groups):

            def read(path=path, meta=meta, group=group, partitions=partitions):
                how = {"pre_buffer": True} if isinstance(path, Url) else {"pre_buffer": False, "buffer_size": 1 << 20}
                file = parquet.ParquetFile(parquet_of(path), metadata=meta, page_checksum_verification=True, **how)
                with file:
                    for chunk in file.iter_batches(batch_size=BLOCK_ROWS, row_groups=[group], columns=own):
                        yield _filled(call, path.name, chunk, schema, partitions, extra)

            rows = meta.row_group(group).num_rows
            parts.append(Part(path.name, "row", first, rows, read))
            first += rows
    return Source(schema, parts, name, tuple(path for path, _ in files))


def _unified(call: str, files: list, schema, schemas: list, extra: set[str]):
    """Return a schema whose types hold the values of all files: int32 and int64 become int64."""
    import pyarrow as pa

    for (path, _), other in zip(files[1:], schemas[1:], strict=True):
        names = [f.name for f in schema if f.name not in extra]
        absent = absent_problems(f"`{path.name}`", other.names, names) if names else ()  # partitions alone are wanted
        check(call, absent, _folder_problems(path, other.names, extra))
        for i in [i for i, f in enumerate(schema) if f.name not in extra]:
            theirs = other.field(schema[i].name)
            if theirs.type == schema[i].type:
                continue
            try:
                pair = [pa.schema([schema[i].with_nullable(True)]), pa.schema([theirs.with_nullable(True)])]
                schema = schema.set(i, pa.unify_schemas(pair, promote_options="permissive")[0])
            except pa.ArrowException:
                what = f"column `{theirs.name}` of `{path.name}` has another type than in `{files[0][0].name}`."
                fail(call, what, got=f"{theirs.type}", need=f"{schema[i].type}", kind=TypeError)
    return schema


def _folder_problems(path: Path, names: list[str], extra: set[str]) -> Iterator[Problem]:
    """Yield a problem if a file has a column that the first file takes from the name of its folder."""
    if both := sorted({*names} & extra):
        what = f"`{path.name}` has columns that folders' names give."
        hint = "another name for the folder, or the column"
        yield Problem(what, f"{both}", "a column of all files, or of none", hint)


def _text_parts(call: str, files: list, wanted: Wanted, form: Text) -> Source:
    """Return a source with one part for each file, and with the types of the first file."""
    import pyarrow as pa
    from pyarrow import csv

    check(call, _form_problems(form))
    types = {n: pa.type_for_alias(t) if isinstance(t, str) else t for n, t in form.types.items()}
    names = None if form.names is None else list(form.names)

    def lines(path: Path, types: dict[Any, Any], include: list[str] | None):
        # With several threads, errors of pyarrow do not name the line.
        return csv.open_csv(
            text_of(path) if isinstance(path, Url) else path,
            csv.ReadOptions(column_names=names, use_threads=False, block_size=BLOCK_BYTES),
            csv.ParseOptions(
                delimiter=form.delimiter, quote_char='"' if form.quotes else False, ignore_empty_lines=False,
                newlines_in_values=form.quotes,
            ),
            csv.ConvertOptions(
                column_types=types, null_values=list(form.nulls), strings_can_be_null=True, include_columns=include,
                quoted_strings_can_be_null=False,
            ),
        )  # fmt: skip

    path = files[0][0]
    attempt = lambda p, at, step: _or_line(call, p, at, step, lambda: lines(p, {}, None).schema.names)
    if names is not None and set(names) <= set(types):
        schema = pa.schema([(n, types[n]) for n in names])
    else:
        as_text = lambda p, of: next(lines(p, dict.fromkeys(of, pa.string()), of))

        def fields(p: Path) -> list:
            found = lines(p, types, None)
            for chunk in islice(found, 1):
                once = {n for n in chunk.schema.names if chunk.schema.names.count(n) == 1}
                inferred = sorted(once.intersection(wanted_names(wanted) or once) - set(types))
                check_floats(call, p, chunk.select(inferred), partial(as_text, p))
                check_text(call, p, chunk.select(inferred), 1 if names else 2)
            return [(f.name, f.type) for f in found.schema]

        schema = _inferred([p for p, _ in files], lambda p: attempt(p, 1, lambda: fields(p)))
    if unknown := [n for n in types if n not in schema.names]:
        what, need = f"`types` names a column that `{path.name}` lacks.", f"among {schema.names}"
        fail(call, what, got=repr(unknown[0]), need=need, hint=repr(nearest(repr(unknown[0]), schema.names)))
    chosen, extra = _with_partitions(call, schema, files, wanted, f"`{path.name}`")
    own = {f.name: f.type for f in chosen if f.name not in extra}
    header = 0 if names else 1

    def read(path: Path, partitions: dict[Any, Any]):
        last = attempt(path, 1, lambda: last_column(path, form.delimiter, names)) if form.quotes else None
        read = own if last is None else {last: pa.binary(), **own}
        at, found, doubt = 1 + header, attempt(path, 1, lambda: lines(path, read, list(read))), False
        while (chunk := attempt(path, at, lambda: next(found, None))) is not None:
            at += chunk.num_rows
            doubt = ends_in_a_line_break(chunk, last) if last and chunk.num_rows else doubt
            yield _filled(call, path.name, chunk, chosen, partitions, extra)
        if doubt:
            check_quotes(call, path, form.delimiter)

    parts = [Part(p.name, "line", 1 + header, None, lambda p=p, by=by: read(p, by)) for p, by in files]
    return Source(chosen, parts, f"`{path.name}`", tuple(path for path, _ in files))


def _whole_lines(path: Path) -> int:
    """Return how many lines of a packed file can be unpacked. For a file that is not packed, return 0."""
    import pyarrow as pa

    lines = 0
    with contextlib.suppress(pa.ArrowException, OSError), text_of(path) as file:
        while path.suffix in PACKED and (read := file.read(1 << 12)):
            lines += read.count(b"\n")
    return lines


def _inferred(paths: list[Path], fields_of: Callable[[Path], list]):
    """Return the columns of the first file. A column without values takes its type from a later file, or is strings."""
    import pyarrow as pa
    import pyarrow.types as kinds

    fields = fields_of(paths[0])
    for path in paths[1:LOOKED_AT]:
        if not any(kinds.is_null(kind) for _, kind in fields):
            break
        known = dict(fields_of(path))
        fields = [(name, known.get(name, kind) if kinds.is_null(kind) else kind) for name, kind in fields]
    return pa.schema([(name, pa.string() if kinds.is_null(kind) else kind) for name, kind in fields])


def _or_line(call: str, path: Path, at: int, step: Callable[[], Any], names: Callable[[], list[str]]) -> Any:
    """Return the result of `step`. An error names the line that pyarrow names, else the first line not read."""
    import pyarrow as pa

    try:
        return step()
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        raise_of_store(error)
        found = re.search(r"(column #\d+: )?Row #(\d+): (.*)", str(error), re.DOTALL)
        column, number, got = found.groups() if found else (None, max(at, _whole_lines(path) + 1), str(error))
        need = "a whole file, of rows of as many fields as there are names"
        hint = "the file once more from where it came"
        if isinstance(error, UnicodeDecodeError) or is_utf16(path):
            need, hint = "text in UTF-8", 'path.write_text(path.read_text("utf-16"))'
        where = ""
        if column:
            name = names()[int(re.findall(r"[0-9]+", column)[0])]
            where, need = f", column `{name}`", "a value of the column's type"
            fitting = "float64" if is_fraction(got) else "string"
            hint = f'Text(types={{"{name}": "{fitting}"}}), where the type was inferred from the rows before'
            if "invalid UTF8" in got:
                need, hint = "text in UTF-8", 'path.write_text(path.read_text("latin-1"))'
        fail(call, f"`{path.name}`, line {number}{where} cannot be read.", got=got[:120], need=need, hint=hint)


def _form_problems(form: Text) -> Iterator[Problem]:
    import pyarrow as pa

    for name, kind in form.types.items():
        try:
            pa.type_for_alias(kind) if isinstance(kind, str) else pa.field(name, kind)
        except (ValueError, TypeError):
            hint = f'Text(types={{"{name}": "string"}})'
            yield Problem(f"`types[{name!r}]` is not a type.", describe(kind), "a type of pyarrow, or its name", hint)
