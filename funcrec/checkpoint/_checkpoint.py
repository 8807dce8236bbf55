"""Checkpoints: any tree of tensors and plain numbers, in one file, or in a folder if many ranks write.

    load(save(path, x)) == x, bit for bit        under any plan, on any numbers of ranks in the two calls

`load` needs no example, and runs no code from the file.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch

from funcrec.checkpoint._asynchronous import Saving, finish, go_on, num_live, ranks_beside, settle
from funcrec.checkpoint._folder import (
    MANIFEST,
    Files,
    fail_if_manifest,
    fail_without_manifest,
    is_folder,
    read_manifest,
)
from funcrec.checkpoint._format import read_index
from funcrec.checkpoint._job import copy_problems, copy_rest, job_of, step_problems
from funcrec.checkpoint._like import difference_problems, given_problems, of_step_problems, step_kind_problems
from funcrec.checkpoint._place import Reader, Target, device_of, place_of, placed, target_problems
from funcrec.checkpoint._rank_parts import is_of_ranks, ranks_of
from funcrec.checkpoint._same_layout import emulated_mesh_of, layout_problems, sharded_in, target_like
from funcrec.checkpoint._steps import Keep
from funcrec.checkpoint._tree_json import CodeError, decode, transform_problems
from funcrec.core import Count, Problem, Size, check, fail, sure, typed
from funcrec.files import Url, as_path, open_file, steady
from funcrec.mesh import Codec, Mesh, Ranks, apart_problems, called_by_all_ranks, together
from funcrec.optim import RowOptimizer
from funcrec.sharding import Plan
from funcrec.train import TrainState, update_of

SAVE, LOAD = "funcrec.save", "funcrec.load"
T = TypeVar("T")


@overload
def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    mesh: Mesh | None = None,
    keep: Count | None = None,
    step: Size | None = None,
    asynchronous: Literal[False] = False,
    copy_bytes: Size | None = None,
) -> Path: ...
@overload
def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    mesh: Mesh | None = None,
    keep: Count | None = None,
    step: Size | None = None,
    asynchronous: Literal[True],
    copy_bytes: Size | None = None,
) -> Saving: ...
@overload
def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    mesh: Mesh | None = None,
    keep: Count | None = None,
    step: Size | None = None,
    asynchronous: bool,
    copy_bytes: Size | None = None,
) -> Path | Saving: ...
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
    """Write a tree to one file or to a folder, and return the path.

    The tree may contain dicts, lists, tuples, funcrec's values, tensors, numbers and strings. If it contains a sharded
    state, or `mesh` is given, `save` writes a folder with one file for each rank.

    One file: `save` writes a temporary file next to `path`, flushes it to the disk, and then renames it. An
    interrupted save leaves the old file whole. Readers never see half a file. Of several concurrent saves the one
    that finishes last stays. If `path` is a symbolic link, `save` writes the file that the link names, and the link
    stays.

    A folder: every rank calls `save` with its own tree. A rank writes the parts that only it has, and its share of
    parts that other ranks also have. No rank gathers a tensor. The old content is replaced in one step, when all new
    files are on the disk. If one rank fails, all ranks raise, and the error names that rank. Values that are not
    sharded must be the same on all ranks. (`save` checks this for tensors. It writes numbers and strings from the first
    rank.)

    A store: `path` may be the URL of a name in a store that shows a file only when all of it has arrived: s3://, gs://,
    az://, hf://, memory:// (`pip install 'funcrec[remote]'`, through fsspec and its environment variables). Each file
    is first written to the folder of temporary files of this machine, and then copied in parts. If the store fails,
    `save` raises, and the store holds the old checkpoint or all of the new one.

    Each tensor is written by value: of a view only its own elements, and a tensor that occurs twice is written twice.
    Each loaded tensor is contiguous and has memory of its own.

    Args:
      mesh: the mesh of a sharded tree; by default the layouts in the tree show it. With a mesh all ranks write, for any
        tree.
      keep: the number of checkpoints to keep in the folder `path`, which is made if missing. The new checkpoint is
        named by its step. When it is whole, all checkpoints except it and the keep - 1 others of the highest steps are
        removed. The steps count, and not the times of the saves (see `latest`). Other files, and other contents of
        folders, stay.
      step: with `keep`, the number that names the checkpoint; by default the step of the first TrainState in the tree.
      asynchronous: whether to return as soon as the values are copied. A thread then writes the copy, and the state may
        be donated meanwhile. The next save waits for the thread, and so does the end of the program.
      copy_bytes: the most bytes of the copy on this rank. All other values are written before the call returns. None
        copies all values that this rank writes.

    Returns:
      The path of the checkpoint, or for a URL a value whose text is the URL; with `asynchronous` a `Saving`, whose
      `wait()` returns the path. Errors then come from `wait`, or from the next save.

    Raises:
      TypeError: if a leaf or a key would not come back the same (a tensor that is not plain and dense, or that is
        differentiated, a number of numpy, an Enum). The error names each of them, before `save` writes anything.
      ValueError: if copies that trained apart differ.
      OSError: if the disk is full, or the folder or the store cannot be written.
      ModuleNotFoundError: if the package for a store is missing.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = fr.save(folder + "/state.pt", {"w": torch.ones(2), "epoch": 3})
      ...     fr.load(path)
      {'w': tensor([1., 1.]), 'epoch': 3}
    """
    where = as_path(SAVE, path, remote=True)
    check(SAVE, transform_problems(), copy_problems(asynchronous, copy_bytes), step_problems(keep, step))
    return write(where, tree, mesh, None if keep is None else Keep(keep), step, asynchronous, copy_bytes)


@called_by_all_ranks(is_of_ranks)
def save_owned(
    path: Path, tree: Any, *, keep: int, owns: Callable[[], bool], step: int, asynchronous: bool
) -> Path | Saving:
    """Write a checkpoint as `save` with `keep` does, to a folder of one run.

    The first rank removes others only if owns(), and then also those of higher steps.
    """
    where = as_path(SAVE, path, remote=True)
    return write(where, tree, None, Keep(keep, owns), step, asynchronous, None)


def write(
    path: Path, tree: Any, mesh: Mesh | None, keep: Keep | None, step: int | None, asynchronous: bool,
    copy_bytes: int | None,
) -> Path | Saving:  # fmt: skip
    """Write a checkpoint, or begin to: the last save comes to its end first."""
    settle()
    job = job_of(path, tree, mesh, keep, step, asynchronous)
    if not asynchronous:
        job.run(lambda: None, job.ranks)
        return job.path
    live = num_live([p.rows.nbytes for own in job.pieces for p in own], copy_bytes)
    together(job.ranks, SAVE, "copy its part", lambda: copy_rest(job.pieces, live))
    ranks = ranks_beside(job.ranks)
    return go_on(job.path, lambda wrote: job.run(wrote, ranks), live)


class Loading(TypedDict, total=False):
    """What `load` takes beside a path and an example."""

    device: torch.device | str | None
    plan: Plan | None
    mesh: Mesh | None
    sparse: RowOptimizer | None
    exact: bool
    codec: Codec | None
    dedup: bool
    dense_axes: Sequence[str]
    mmap: bool


@overload
def load(path: str | os.PathLike[str], *, like: None = None, **how: Unpack[Loading]) -> Any: ...
@overload
def load(path: str | os.PathLike[str], *, like: Callable[[T, Any], tuple[T, Any]], **how: Unpack[Loading]) -> T: ...
@overload
def load(path: str | os.PathLike[str], *, like: T, **how: Unpack[Loading]) -> T: ...
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
    """Return the tree that `save` wrote to a file or a folder, or to a store, of which it reads only what it needs.

    Args:
      like: a tree to compare with. The error lists every path whose kind, shape or dtype differs, or that only one tree
        has. Without a plan, states are laid out as a sharded TrainState in `like` is, whatever plan saved them; `mesh`
        is the mesh of that state, and need not be given if it is emulated. Or a step of `train_step`, or `jit` of it:
        states are laid out as its first state is, by its plan on its mesh. The states of both its optimizers must have
        the names that were saved; Adam, AdamW and RAdam share theirs.
      device: the device of the tensors; by default the device that they were saved from, or with a mesh of real ranks
        this rank's device.
      plan, mesh, exact, codec, dedup, dense_axes: the arguments of the `train_step` that continues. Every TrainState in
        the tree is laid out as they say, and each rank reads only its own rows of the tables. All ranks call `load`.
        With a mesh but no plan the tables are plain: whole on every rank, and on its device.
      sparse: the row optimizer of that step, which decides which tables may share a bank. Without `sparse` each table
        has a bank of its own, which is correct under any optimizer, but costs more exchanges. `sparse` is required if
        gradients wait (`optim.accumulate`).
      mmap: whether tensors on the CPU use the memory of the file, which the system may drop and read again. Writes to
        such tensors stay in this process. `mmap` excludes a store; and a plan, because ranks then read parts. Every
        byte is read once, to check its CRC. A tensor that lies in several files is read as without `mmap`.

    Raises:
      ValueError: if a file is truncated, is damaged (a CRC covers every byte) or is not a checkpoint, or if the tree
        differs from `like`. For a folder the error names the file and the rows that are missing or damaged.
      FileNotFoundError: if there is nothing at the path.

    Cost: for a folder, reads the index of each file, and each block of 16 MiB that holds a row to read. A table in a
      single file is read whole to check its CRC, 256 KiB at a time.

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
        try   like=None, which loads the file as it is
    """
    where = as_path(LOAD, path, remote=True)
    finish()
    how: dict[str, Any] = {
        "sparse": sparse,
        "exact": exact,
        "codec": codec,
        "dedup": dedup,
        "dense_axes": tuple(dense_axes),
    }
    step = update_of(like)
    check(LOAD, () if step is not None else step_kind_problems(like))
    if step is not None:
        check(LOAD, given_problems({"plan": plan, "mesh": mesh, **how}))
        like, mesh, plan = None, step.where.mesh, step.where.plan
        how |= {} if mesh is None else {"sparse": step.recipe.sparse, **(step.where.options or {})}
    target = None if plan is None else Target(plan, mesh, **how)
    held = sharded_in(like) if plan is None else None
    check(LOAD, transform_problems(), target_problems(target, mmap, **how), map_problems(where, mmap))
    if held is not None:
        mesh = mesh or emulated_mesh_of(held)
        check(LOAD, layout_problems(held, mesh, mmap))
        target = target_like(held, sure(mesh))
    said = {n: repr(x) for n, x in {"mesh": mesh and mesh.axes, "plan": plan, **how}.items() if n != "sparse"}
    tree = read(where, target, mesh, device, like, mmap, said)
    check(LOAD, () if step is None else of_step_problems(step.recipe, tree, mesh))
    return tree


def load_as(path: Path, state: TrainState, *, mesh: Mesh, device: torch.device | str | None = None) -> Any:
    """Return the tree that `save` wrote, with its states laid out like a sharded `state`.

    Every rank reads its own rows.
    """
    return read(path, target_like(state, mesh), mesh, device, None, False, {})


def read(
    path: Path, target: Target | None, mesh: Mesh | None, device: Any, like: Any, mmap: bool, said: dict[str, str]
) -> Any:
    """Return the tree, read on this rank. said: arguments that must be the same on all ranks."""
    place = None if device is None else place_of(LOAD, device)
    if place is None and mesh is not None and not mesh.is_emulated:
        place = place_of(LOAD, sure(mesh.device_mesh).device_type)
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
    """Return the tree of a folder's checkpoint.

    If the checkpoint is replaced meanwhile, the function returns the tree of the new checkpoint.
    """
    last = None
    while True:
        try:
            manifest = steady(path / MANIFEST, lambda: read_manifest(LOAD, path))
        except FileNotFoundError:
            fail_without_manifest(LOAD, path)
        except (CodeError, RecursionError) as error:
            damaged(path, error)
        files = Files(LOAD, path, manifest.files, {}, set(), {})
        try:
            reader = Reader(files.open, device_of(place), {} if mmap else None, files.blocks_of)
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
    def work() -> Any:
        with open_file(LOAD, path) as file:
            leaves, code = read_index(file)
            return made(leaves, code, Reader(lambda block, x: file, device_of(place), {} if mmap else None), target)

    try:
        return steady(path, work)
    except (CodeError, RecursionError) as error:
        damaged(path, error)


def made(leaves: Sequence[Any], code: Any, reader: Reader, target: Target | None) -> Any:
    """Return the decoded tree. Each tensor is read when its node is decoded."""
    tensors = iter(leaves) if target is not None else map(reader.whole, leaves)
    tree = decode(code, tensors)
    if next(tensors, None) is not None:
        raise CodeError("more tensors in the file than in its tree")
    return tree if target is None else placed(tree, target, reader)


def map_problems(path: Path | Url, mmap: bool) -> Iterator[Problem]:
    if mmap and isinstance(path, Url):
        yield Problem("`mmap` requires a file of this machine.", f"{path}", "a local path", "mmap=False")


def damaged(path: Path, error: Exception):
    hint = "an older checkpoint; `save` itself never leaves half a file"
    fail(LOAD, f"`{path.name}` is not a whole checkpoint.", got=str(error), need="a file that save wrote", hint=hint)
