"""Named tensors in the safetensors format, for other libraries.

length of the header, u64 | header, JSON: dtype, shape and place of each | their bytes, the widest dtypes first
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from funcrec.checkpoint._place import place_of
from funcrec.checkpoint._rank_parts import is_of_ranks, ranks_of
from funcrec.checkpoint._tree_json import encode, transform_problems
from funcrec.core import Problem, check, describe, fail, sure, typed
from funcrec.files import DTYPE_NAMES, HEAD, as_path, header_of, lay, local_copy, open_file, write_bytes, write_whole
from funcrec.mesh import Mesh, apart_problems, called_by_all_ranks, together
from funcrec.sharding import ShardedTables, gather_tables
from funcrec.tables import is_plain, layout_in

SAVE, LOAD = "funcrec.save_safetensors", "funcrec.load_safetensors"
MOST_HEADER = 100_000_000  # bytes; readers refuse a longer one
SINCE = ("C64", "C128", "C32", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ")  # what its library has not always read
NAMES = {dtype: name for dtype, name in DTYPE_NAMES.items() if name not in SINCE}


@called_by_all_ranks(is_of_ranks)
@typed
def save_safetensors(
    path: str | os.PathLike,
    tensors: Mapping[str, Tensor] | ShardedTables,
    *,
    mesh: Mesh | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write tables, or dense parameters, to a safetensors file, which other libraries read.

    As `save` does, the file takes its name when all of it is on the disk. The format has no checksums and no trees: use
    `save` for states that training continues from.

    Args:
      tensors: {name: tensor}; or a state's sharded tables, written whole.
      mesh: of sharded tables. On real ranks every rank calls it; each gathers the tables whole, and the first one
        writes. For tables that no rank has room for, use `save`, and pass the result of one process's
        `load(folder, mmap=True)`.
      metadata: texts for the header.

    Returns:
      the path.

    Raises:
      TypeError: the format lacks something: a dict in the dict, complex numbers, a tensor that is differentiated.
      OSError.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = fr.save_safetensors(folder + "/tables.safetensors", {"item": torch.ones(2)})
      ...     fr.load_safetensors(path)
      {'item': tensor([1., 1.])}
    """
    ranks = ranks_of(mesh)
    where, sharded = as_path(SAVE, path, remote=True), cast(Any, tensors) if layout_in(tensors) is not None else None
    check(
        SAVE, transform_problems(), kind_problems(tensors), sharded_problems(tensors, mesh), metadata_problems(metadata)
    )
    check(SAVE, tensors_problems(tensors if sharded is None else sharded.banks))
    said = {"mesh": repr(mesh and mesh.axes), "tensors": repr(sorted(tensors) if sharded is None else sharded.layout)}
    check(SAVE, apart_problems(together(ranks, SAVE, "save its tensors", lambda: said)))
    plain = dict(tensors if sharded is None else gather_tables(sharded, sure(mesh)))
    write = lambda: write_whole(SAVE, where, lambda file: write_tensors(file, plain, dict(metadata or {})))
    together(ranks, SAVE, "write the file", write if ranks.is_first else lambda: None)
    return where


def write_tensors(file: BinaryIO, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write the tensors in the layout of the format's own library."""
    order = sorted(tensors, key=lambda n: (list(NAMES).index(tensors[n].dtype), n))
    header = header_of(lay([(n, tensors[n].dtype, tensors[n].shape) for n in order], 1), metadata, HEAD)
    if len(header) - HEAD > MOST_HEADER:
        got, need = f"{len(header) - HEAD:,} bytes", f"at most {MOST_HEADER:,} bytes"
        fail(SAVE, "the names do not fit into the header.", got=got, need=need, hint="several files")
    file.write(header)
    for n in order:
        write_bytes(file, tensors[n])


@typed
def load_safetensors(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None, mmap: bool = False
) -> dict[str, Tensor]:
    """Read a safetensors file of any library: {name: tensor}, sorted by name. Needs the package `safetensors`.

    Args:
      device: where the tensors go; by default the CPU.
      mmap: whether tensors use the memory of the file, which the system may drop and read again. Writes to them stay in
        this process.

    Raises:
      ModuleNotFoundError: without the package.
      ValueError: the header shows that the file is damaged (the format has no checksums).
      FileNotFoundError.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> from safetensors.torch import save_file
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_file({"w": torch.zeros(2), "b": torch.ones(1)}, folder + "/model.safetensors")
      ...     fr.load_safetensors(folder + "/model.safetensors")
      {'b': tensor([1.]), 'w': tensor([0., 0.])}
    """
    where = as_path(LOAD, path, remote=True)
    check(LOAD, transform_problems())
    place = place_of(LOAD, "cpu" if device is None else device)
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        need, hint = "the package safetensors", "pip install 'funcrec[safetensors]'"
        what = "the reader of safetensors is not installed."
        fail(LOAD, what, got="no module safetensors", need=need, hint=hint, kind=ModuleNotFoundError)
    open_file(LOAD, where).close()
    try:
        with local_copy(where) as here, safe_open(here, framework="pt") as file:
            own = lambda x: x if mmap or place.type != "cpu" else x.clone()
            return {n: own(file.get_tensor(n)).to(place) for n in sorted(file.keys())}
    except (SafetensorError, OSError) as error:
        need, hint = "a whole safetensors file", "fr.load, of a checkpoint of funcrec"
        fail(LOAD, f"`{where.name}` is not a safetensors file.", got=str(error)[:200], need=need, hint=hint)


# -- validators --------------------------------------------------------------------------------------------------


def sharded_problems(tensors: Any, mesh: Mesh | None) -> Iterator[Problem]:
    layout = layout_in(tensors)
    if layout is None:
        return
    axes = dict(layout.mesh_shape)
    if mesh is None:
        yield Problem("`mesh` is missing.", "sharded tables", "the mesh that they lie on", "mesh=mesh")
    elif mesh.axes != layout.mesh_shape:
        yield Problem("`tensors` lie on another mesh.", f"{mesh!r}", f"axes {axes}", "their own mesh")


def metadata_problems(metadata: Mapping[str, str] | None) -> Iterator[Problem]:
    for key, text in (metadata or {}).items():
        yield from text_problems(key, f"metadata[{key!r}]")
        yield from text_problems(text, f"metadata[{key!r}]")


def kind_problems(tensors: Any) -> Iterator[Problem]:
    """Report tables of a type that holds more than its tensors, which the file would lose."""
    is_sharded = layout_in(tensors) is not None
    if (tensors.of is not dict) if is_sharded else not is_plain(tensors):
        got, hint = describe(tensors), "fr.save, which keeps all of it; dict(tensors), for the tensors alone"
        yield Problem("`tensors` are more than tensors by name.", got, "{name: tensor}", hint, TypeError)


def tensors_problems(tensors: Mapping[str, Any]) -> Iterator[Problem]:
    """Report tensors without a plain name or a dtype of the format."""
    for n, x in tensors.items():
        path = f"tensors[{n!r}]"
        yield from text_problems(n, path)
        if n == "__metadata__":
            yield Problem(f"`{path}` has the name of the header's texts.", repr(n), "another name", "metadata={...}")
        found = encode(x, path).problems
        yield from found
        if not found and x.dtype not in NAMES:
            need = f"one of {', '.join(NAMES.values())}"
            yield Problem(f"`{path}` has a dtype that the format lacks.", describe(x), need, "fr.save", TypeError)


def text_problems(text: str, path: str) -> Iterator[Problem]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        yield Problem(f"{path!a} is not text.", ascii(text)[:60], f"text in UTF-8 ({error.reason})", "another text")
