"""Whole tables from caches and stores, in memory or in files: for exports, evaluation and saves.

whole[row] == the cache's row, if the cache has it, else the store's

Shapes: R rows of a store, D dim.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from funcrec.cached._place import Place, dynamic_of, read_records, seen_after
from funcrec.cached._records import unpacked
from funcrec.cached._table_store import TableStore
from funcrec.core import fail
from funcrec.files import as_path, raise_os
from funcrec.kinds import DynamicTables
from funcrec.tables import TableConfig

CALL = "funcrec.cached_step.gather"
CHUNK = 1 << 16  # rows that are read at once


def whole_tables(
    place: Place, dynamic: DynamicTables, stores: Mapping[str, TableStore], path: str | os.PathLike | None
) -> dict[str, Tensor]:
    """Return {table: f[R, D]}, with all rows of the stores. dynamic: the tables of the state, gathered."""
    tables, folder = dict(dynamic.tables), None
    if path is not None:
        made: list[Path] = []
        place.together("make its folder", lambda: made.append(new_folder(path)))
        folder = made[0]
    for name, store in stores.items():
        new: list[dict[str, Tensor]] = []
        place.together("make its files", lambda: new.append({c.name: new_table(c, folder) for c in store.configs}))  # noqa: B023
        whole = new[0]
        for rows in torch.arange(store.num_rows).split(CHUNK):
            found, _ = unpacked(store.fields, read_records(place, store, rows))
            for table, x in whole.items():
                x[rows[0] : rows[-1] + 1] = found[table]
        vocabulary = dynamic_of(dynamic).vocabularies[name]
        for rows in seen_after(vocabulary, 0).split(CHUNK):
            ids = vocabulary.entries[rows, 0].cpu()
            for table, x in whole.items():
                x.index_copy_(0, ids, dynamic.tables[table][rows].cpu())
        device = vocabulary.tags.device if folder is None else "cpu"
        tables |= {n: x.to(device) for n, x in whole.items()}
    return tables


def new_folder(path: str | os.PathLike) -> Path:
    folder = as_path(CALL, path, "folder", '"runs/whole"')
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise_os(CALL, error, f"`{folder}` cannot be made.", "a folder that does not exist", "another path")
    return folder


def new_table(config: TableConfig, folder: Path | None) -> Tensor:
    """Return a table f[R, D] to write to, in memory or mapped from a file of the folder."""
    if folder is None:
        return torch.empty(config.shape, dtype=config.dtype)
    file, size = folder / f"{quote(config.name, safe='')}.rows", config.num_embeddings * config.embedding_dim
    try:
        with open(file, "xb") as made:
            os.posix_fallocate(made.fileno(), 0, size * config.dtype.itemsize)
        return torch.from_file(str(file), shared=True, size=size, dtype=config.dtype).view(config.shape)
    except OSError as error:
        raise_os(CALL, error, f"`{file}` cannot be written.", "a disk with room for all rows", "another path")
    except RuntimeError as error:
        fail(CALL, f"`{file}` cannot be mapped.", got=str(error).splitlines()[0], need="a file system that maps files")
