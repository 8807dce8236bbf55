"""Checkpoints: any tree of tensors and plain numbers, in one file or, of many ranks, in a folder.

    load(save(path, x)) == x, bit for bit        under whatever plan, on however many ranks either was called

No example is needed to read one, and nothing in it is run.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrec.checkpoint._asynchronous import Saving, finish, go_on, num_live, ranks_beside, settle
from funcrec.checkpoint._folder import Files, fail_if_manifest, fail_without_manifest, is_folder, read_manifest
from funcrec.checkpoint._format import read_header
from funcrec.checkpoint._job import copy_problems, copy_rest, job_of, step_problems
from funcrec.checkpoint._place import Reader, Target, axes_of, device_of, place_of, placed, target_problems
from funcrec.checkpoint._together import Ranks, apart_problems, called_by_all_ranks, ranks_of, together
from funcrec.checkpoint._tree_json import CodeError, decode, show, transform_problems
from funcrec.core import CLASSES, Count, Problem, Size, check, class_name, describe, fail, typed
from funcrec.files import as_path, open_file
from funcrec.mesh import Codec, Mesh
from funcrec.optim import RowOptimizer
from funcrec.sharding import Plan
from funcrec.train import TrainState

SAVE, LOAD = "funcrec.save", "funcrec.load"


@called_by_all_ranks
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
    """Write a tree (dicts, lists, tuples, funcrec's values, tensors, numbers, strings) to one file; a tree with a
    sharded state in it, or of a mesh, to a folder of a file for each rank.

    One file: the bytes go to a temporary file next to `path`, are flushed to the disk and then take its name: an
    interrupted save leaves the old file whole, readers never see half of one, and of several savers at once the last to
    finish stays. Of a symbolic link the file that it names is written, and the link stays.

    A folder: every rank calls it, with its own tree, and writes what it alone has and its share of what others have,
    too; nothing is gathered. What the folder held is replaced when all that is new is on the disk, in one step. Where
    one rank fails all raise, and the error names it. What is not sharded is the same on all ranks (tensors are held to
    it; of numbers and strings the first rank's are written).

    Each tensor is written by value: a view without the rest of its memory, one that stands in two places twice. As
    loaded, each is contiguous and has memory of its own.

    Args:
      mesh: of a sharded tree; its layouts tell it where it is not given. With it any tree is written by all ranks.
      keep: `path` is a folder of checkpoints, made where it is not there: this one is called by its step, and when it
        is whole all others but the keep - 1 of the highest steps are removed, by their steps and not by when they were
        saved (see `latest`). Files of other kinds and folders' other contents stay.
      step: the number that names it, with `keep`; by default that of the first TrainState in the tree.
      asynchronous: return when what is to be written is copied; a thread writes it, and the state may be donated
        meanwhile. The next save waits for it, and so does the end of the program.
      copy_bytes: the most that the copy may take on this rank: what is beyond it is written before the call returns.
        None for all that this rank writes.

    Returns:
      the path of the checkpoint; a `Saving`, whose `wait()` gives it, where asynchronous. What goes wrong then is
      raised by `wait`, or by the next save.

    Raises:
      TypeError: names every leaf and key that would not come back the same (another tensor than a plain, dense one, one
        of which a derivative is wanted, a number of numpy, an Enum), before anything is written.
      ValueError: copies that trained apart.
      OSError: when the disk is full or the folder cannot be written.

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


@called_by_all_ranks
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
    """Read what `save` wrote, a file or a folder, files of older formats too.

    Args:
      like: a tree to compare with; the error lists every path whose kind, shape or dtype differs, or that only one has.
      device: where the tensors go; by default where they were saved from, with a mesh of ranks that of this rank.
      plan, mesh, exact, codec, dedup, dense_axes: as of the `train_step` that goes on: every TrainState in the tree is
        laid out so, and each rank reads of the tables what it is to hold. All ranks call it. With a mesh alone the
        tables are plain, whole on every rank, and on its device.
      sparse: the row optimizer of that step, which says what tables may share a bank. Without it each has its own:
        right under any optimizer, in more exchanges. Where gradients wait (`optim.accumulate`) it must be given.
      mmap: tensors on the CPU have the file's memory, which the system may take back and read again; what is written to
        them is in this process alone. Not with a plan, whose ranks read parts. Every byte is read once, to its CRC. A
        tensor that lies in several files, or in a file of an older format, is read as without it.

    Raises:
      ValueError: a file that is truncated, damaged (every byte is under a CRC) or no checkpoint, and a tree unlike
        `like`. Of a folder the file and the rows that are missing or damaged are named.
      FileNotFoundError: a path where nothing is.

    Cost: of a folder, every file's own index, and blocks of 16 MiB of which some row is wanted; a table of one file
      is read whole, to its CRC, and 256 KiB of it held.

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
    """As `load`, the states in it laid out as a sharded one is, which every rank reads its own rows for."""
    target = Target(None, mesh, None, False, None, False, axes_of(state), like=state)
    return read(path, target, mesh, device, None, False, {})


def read(
    path: Path, target: Target | None, mesh: Mesh | None, device: Any, like: Any, mmap: bool, said: dict[str, str]
) -> Any:
    """The tree, on this rank. said: what is to be the same on all."""
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

    check(LOAD, apart_problems(together(ranks, LOAD, "load it", work)[1]))
    return tree


# -- a folder ----------------------------------------------------------------------------------------------------


def read_folder(path: Path, target: Target | None, place: torch.device | None, mmap: bool, ranks: Ranks) -> Any:
    """The tree of a folder's checkpoint; of the new one where it was replaced meanwhile."""
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
            leaves, code = read_header(file)
            return made(leaves, code, Reader(lambda block, x: file, device_of(place), {} if mmap else None), target)
        except (CodeError, RecursionError) as error:
            damaged(path, error)


def made(leaves: Sequence[Any], code: Any, reader: Reader, target: Target | None) -> Any:
    """The tree, its tensors read when they are met."""
    tensors = iter(leaves) if target is not None else map(reader.whole, leaves)
    tree = decode(code, tensors)
    if next(tensors, None) is not None:
        raise CodeError("more tensors in the file than in its tree")
    return tree if target is None else placed(tree, target, reader)


def damaged(path: Path, error: Exception):
    hint = "an older checkpoint; `save` itself never leaves half a file"
    fail(LOAD, f"`{path.name}` is not a whole checkpoint.", got=str(error), need="a file that save wrote", hint=hint)


def difference_problems(tree: Any, like: Any) -> Iterator[Problem]:
    """Every node in which two trees differ in place, kind, shape or dtype."""
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
    """(path, (what it is, whether it is a leaf)) of every node."""
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
