"""Checkpoints: any tree of tensors and plain numbers, in one file or, from many ranks, in a folder.

    load(save(path, x)) == x, bit for bit        under any plan, on any number of ranks in either call

Loading needs no example, and runs nothing from the file.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrec.checkpoint._asynchronous import Saving, finish, go_on, num_live, ranks_beside, settle
from funcrec.checkpoint._folder import Files, fail_if_manifest, fail_without_manifest, is_folder, read_manifest
from funcrec.checkpoint._format import read_index
from funcrec.checkpoint._job import copy_problems, copy_rest, job_of, step_problems
from funcrec.checkpoint._place import Reader, Target, axes_of, device_of, place_of, placed, target_problems
from funcrec.checkpoint._rank_parts import is_of_ranks, ranks_of
from funcrec.checkpoint._tree_json import CodeError, decode, show, transform_problems
from funcrec.core import CLASSES, Count, Problem, Size, check, class_name, describe, fail, typed
from funcrec.files import as_path, open_file
from funcrec.mesh import Codec, Mesh, Ranks, apart_problems, called_by_all_ranks, together
from funcrec.optim import RowOptimizer
from funcrec.sharding import Plan
from funcrec.train import TrainState

SAVE, LOAD = "funcrec.save", "funcrec.load"


@called_by_all_ranks(is_of_ranks)
@typed
def save(
    path: str | os.PathLike,
    tree: Any,
    *,
    mesh: Mesh | None = None,
    keep: Count | None = None,
    step: Size | None = None,
    asynchronous: bool = False,
    copy_bytes: Size | None = None,
) -> Path | Saving:
    """Write a tree (dicts, lists, tuples, funcrec's values, tensors, numbers, strings) to one file, or to a folder.

    It writes a folder, with one file for each rank, if the tree contains a sharded state, or `mesh` is given.

    One file: the bytes go to a temporary file next to `path`, are flushed to the disk, and then the file is renamed. An
    interrupted save leaves the old file whole, readers never see half a file, and of several concurrent saves the one
    that finishes last stays. If `path` is a symbolic link, the file that it names is written, and the link stays.

    A folder: every rank calls it with its own tree. It writes what only it has, and its share of what others also have;
    nothing is gathered. The old content is replaced in one step, when all new files are on the disk. If one rank fails,
    all raise, and the error names it. What is not sharded must be the same on all ranks (this is checked for tensors;
    numbers and strings are written from the first rank).

    Each tensor is written by value: a view without the rest of its memory, and one that occurs twice is written twice.
    Each loaded tensor is contiguous and has memory of its own.

    Args:
      mesh: of a sharded tree; by default its layouts tell it. With a mesh all ranks write any tree.
      keep: `path` is a folder of checkpoints, made if missing. This one is named by its step. When it is whole, all
        except it and the keep - 1 others of the highest steps are removed; their steps count, not when they were saved
        (see `latest`). Other files, and other contents of folders, stay.
      step: the number that names it, with `keep`; by default that of the first TrainState in the tree.
      asynchronous: return when what is to be written is copied; a thread writes it, and the state may be donated
        meanwhile. The next save waits for it, and so does the end of the program.
      copy_bytes: the most that the copy may take on this rank; the rest is written before the call returns. None copies
        all that this rank writes.

    Returns:
      the path of the checkpoint; with `asynchronous` a `Saving`, whose `wait()` returns it. Errors then raise from
      `wait`, or from the next save.

    Raises:
      TypeError: names every leaf and key that would not come back the same (a tensor that is not plain and dense, or
        that a derivative follows, a number of numpy, an Enum), before anything is written.
      ValueError: if copies trained apart.
      OSError: if the disk is full or the folder cannot be written.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = fr.save(folder + "/state.pt", {"w": torch.ones(2), "epoch": 3})
      ...     fr.load(path)
      {'w': tensor([1., 1.]), 'epoch': 3}
    """
    path = as_path(SAVE, path)
    check(SAVE, transform_problems(), copy_problems(asynchronous, copy_bytes), step_problems(keep, step))
    settle()
    job = job_of(path, tree, mesh, keep, step, asynchronous)
    if not asynchronous:
        job.run(lambda: None, job.ranks)
        return job.path
    live = num_live([p.rows.nbytes for own in job.pieces for p in own], copy_bytes)
    together(job.ranks, SAVE, "copy its part", lambda: copy_rest(job.pieces, live))
    ranks = ranks_beside(job.ranks)
    return go_on(job.path, lambda wrote: job.run(wrote, ranks), live)


@called_by_all_ranks(is_of_ranks)
@typed
def load(
    path: str | os.PathLike,
    *,
    like: Any = None,
    device: torch.device | str | None = None,
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    sparse: RowOptimizer | None = None,
    exact: bool = False,
    codec: Codec | None = None,
    dedup: bool = False,
    dense_axes: Sequence[str] = (),
    mmap: bool = False,
) -> Any:
    """Read what `save` wrote, a file or a folder.

    Args:
      like: a tree to compare with; the error lists every path whose kind, shape or dtype differs, or that only one has.
      device: where the tensors go; by default where they were saved from, or with a mesh of real ranks this rank's
      device.
      plan, mesh, exact, codec, dedup, dense_axes: those of the `train_step` that continues. Every TrainState in the
        tree is laid out accordingly, and each rank reads only its own rows of the tables. All ranks call it. With a
        mesh but no
        plan the tables are plain: whole on every rank, and on its device.
      sparse: the row optimizer of that step, which decides which tables may share a bank. Without it each table has a
        bank
        of its own: correct under any optimizer, but with more exchanges. It is required if gradients wait
        (`optim.accumulate`).
      mmap: tensors on the CPU use the file's memory, which the system may drop and read again; writes to them stay in
        this process. Not allowed with a plan, because ranks then read parts. Every byte is read once, to check its CRC.
        A tensor that lies in several files is read as without `mmap`.

    Raises:
      ValueError: if a file is truncated, damaged (a CRC covers every byte) or no checkpoint, or the tree differs from
        `like`. For a folder it names the file and the rows that are missing or damaged.
      FileNotFoundError: if nothing is at the path.

    Cost: for a folder, each file's index, and each block of 16 MiB that holds a row to read. A table in a single file
      is read whole to check its CRC, 256 KiB at a time.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = fr.save(folder + "/state.pt", {"w": torch.ones(2)})
      ...     fr.load(path, like={"w": torch.ones(3)})
      Traceback (most recent call last):
      ...
      ValueError: funcrec.load: `['w']` has another shape or dtype.
        got   f32[2]
        need  f32[3]
        try   like=None, which loads what there is
    """
    path = as_path(LOAD, path)
    finish()
    how = {"sparse": sparse, "exact": exact, "codec": codec, "dedup": dedup, "dense_axes": tuple(dense_axes)}
    target = None if plan is None else Target(plan, mesh, **how)
    check(LOAD, transform_problems(), target_problems(target, mmap, **how))
    said = {n: repr(x) for n, x in {"mesh": mesh and mesh.axes, "plan": plan, **how}.items() if n != "sparse"}
    return read(path, target, mesh, device, like, mmap, said)


def load_as(path: Path, state: TrainState, *, mesh: Mesh, device: torch.device | str | None = None) -> Any:
    """`load`, with the states in the tree laid out like a sharded one: every rank reads its own rows."""
    target = Target(None, mesh, None, False, None, False, axes_of(state), like=state)
    return read(path, target, mesh, device, None, False, {})


def read(
    path: Path, target: Target | None, mesh: Mesh | None, device: Any, like: Any, mmap: bool, said: dict[str, str]
) -> Any:
    """Read the tree on this rank. said: arguments that must be the same on all ranks."""
    place = None if device is None else place_of(LOAD, device)
    if place is None and mesh is not None and not mesh.is_emulated:
        place = place_of(LOAD, mesh.device_mesh.device_type)
    tree, ranks = None, ranks_of(mesh)

    def work() -> dict[str, str]:
        nonlocal tree
        if is_folder(path):
            tree = read_folder(path, target, place, mmap, ranks)
        else:
            tree = read_file(path, target, place, mmap)
            fail_if_manifest(LOAD, path, tree)
        if like is not None:
            check(LOAD, difference_problems(tree, like))
        return said

    check(LOAD, apart_problems(together(ranks, LOAD, "load it", work)))
    return tree


# -- a folder ----------------------------------------------------------------------------------------------------


def read_folder(path: Path, target: Target | None, place: torch.device | None, mmap: bool, ranks: Ranks) -> Any:
    """Read the tree of a folder's checkpoint; if it was replaced meanwhile, the new one."""
    last = None
    while True:
        try:
            manifest = read_manifest(LOAD, path)
        except FileNotFoundError:
            fail_without_manifest(LOAD, path)
        except (CodeError, RecursionError) as error:
            damaged(path, error)
        files = Files(LOAD, path, manifest.files, {}, set())
        try:
            reader = Reader(files.open, device_of(place), {} if mmap else None)
            tree = made(manifest.leaves, manifest.code, reader, target)
            files.check(ranks.rank, ranks.size)
            return tree
        except (CodeError, RecursionError) as error:
            if manifest == last:
                damaged(path, error)
            last = manifest
        finally:
            files.close()


# -- one file ----------------------------------------------------------------------------------------------------


def read_file(path: Path, target: Target | None, place: torch.device | None, mmap: bool) -> Any:
    with open_file(LOAD, path) as file:
        try:
            leaves, code = read_index(file)
            return made(leaves, code, Reader(lambda block, x: file, device_of(place), {} if mmap else None), target)
        except (CodeError, RecursionError) as error:
            damaged(path, error)


def made(leaves: Sequence[Any], code: Any, reader: Reader, target: Target | None) -> Any:
    """Decode the tree, reading each tensor when it is met."""
    tensors = iter(leaves) if target is not None else map(reader.whole, leaves)
    tree = decode(code, tensors)
    if next(tensors, None) is not None:
        raise CodeError("more tensors in the file than in its tree")
    return tree if target is None else placed(tree, target, reader)


def damaged(path: Path, error: Exception):
    hint = "an older checkpoint; `save` itself never leaves half a file"
    fail(LOAD, f"`{path.name}` is not a whole checkpoint.", got=str(error), need="a file that save wrote", hint=hint)


def difference_problems(tree: Any, like: Any) -> Iterator[Problem]:
    """Report every node in which two trees differ in place, kind, shape or dtype."""
    found, wanted = dict(_nodes(tree, "")), dict(_nodes(like, ""))
    leaves = lambda nodes: [p for p, (_, is_leaf) in nodes.items() if is_leaf]
    hint = "like=None, which loads what there is"
    for path in [p for p in leaves(wanted) if p not in found]:
        yield Problem(f"`{path}` is missing.", "nothing", wanted[path][0], hint)
    for path in [p for p in leaves(found) if p not in wanted]:
        yield Problem(f"`{path}` is not expected.", found[path][0], "nothing", hint)
    for path, (need, is_leaf) in wanted.items():
        if path in found and found[path][0] != need:
            differs = "has another shape or dtype" if is_leaf and found[path][1] else "is another kind of value"
            yield Problem(f"`{path or 'tree'}` {differs}.", found[path][0], need, hint)


def _nodes(node: Any, path: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Yield (path, (kind, whether it is a leaf)) for every node."""
    children: list[tuple[str, Any]] = []
    kind = type(node).__name__
    if isinstance(node, Tensor):
        kind = describe(node)
    elif isinstance(node, dict):
        children = [(f"{path}[{show(k)}]", v) for k, v in node.items()]
    elif isinstance(node, (list, tuple)):
        children = [(f"{path}[{i}]", v) for i, v in enumerate(node)]
    elif class_name(type(node)) in CLASSES:
        values, (fields, static) = CLASSES[class_name(type(node))][0](node)
        kind = f"{kind} {show(static)}" if static else kind
        children = [(f"{path}.{n}".lstrip("."), v) for n, v in zip(fields, values, strict=True)]
    yield path, (kind, not children)
    for where, child in children:
        yield from _nodes(child, where)
