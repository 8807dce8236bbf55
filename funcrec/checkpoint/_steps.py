"""Checkpoints in one folder, named by step: finds the newest checkpoint, and removes old checkpoints.

folder/step-0000001200: a file, or a folder of ranks
"""

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from funcrec.checkpoint._asynchronous import finish
from funcrec.checkpoint._folder import MANIFEST, OURS, STEP, is_folder, read_manifest
from funcrec.checkpoint._format import is_checkpoint, read_index
from funcrec.checkpoint._rank_parts import Seen
from funcrec.checkpoint._tree_json import CodeError
from funcrec.core import fail, typed
from funcrec.files import SUFFIX, Url, as_path, flush, open_file


@typed
def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the path of the newest whole checkpoint that `save(folder, tree, keep=n)` wrote; None if there is none.

    A checkpoint is whole if its file, or every file of its folder, has its full length. `load` also checks their CRCs.
    The folder may be the URL of one in a store.

    Example:
      >>> import os, tempfile, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     none = fr.latest(folder)
      ...     for step in (100, 200, 300):
      ...         _ = fr.save(folder, {"epoch": 1}, step=step, keep=2)
      ...     none, fr.latest(folder).name, sorted(os.listdir(folder))
      (None, 'step-0000000300', ['step-0000000200', 'step-0000000300'])
    """
    finish()
    found = steps_in(as_path("funcrec.latest", folder, remote=True))
    return next((found[n] for n in sorted(found, reverse=True) if is_whole(found[n])), None)


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:010d}"


def step_of(seen: Seen, step: int | None) -> int:
    """Return the number that names a checkpoint."""
    if step is not None:
        return step
    if not seen.steps:
        need, hint = "a TrainState in `tree`, or a number", "step=1200"
        fail("funcrec.save", "the checkpoint has no step to be called by.", got="step=None", need=need, hint=hint)
    return int(seen.steps[0])


def steps_in(folder: Path) -> dict[int, Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return {int(m[1]): x for x in folder.iterdir() if (m := STEP.fullmatch(x.name))}
    return {}


def is_whole(path: Path) -> bool:
    """Return whether all bytes of a checkpoint are there."""
    try:
        if is_folder(path):
            files = read_manifest("funcrec.latest", path).files
            held = path.sizes() if isinstance(path, Url) else {n: (path / n).stat().st_size for n in files}
            return all(held.get(name) == size for name, size in files.items())
        with open_file("funcrec.latest", path) as file:
            read_index(file)
        return True
    except (OSError, CodeError, ValueError, RecursionError) as error:
        if hasattr(error, "store_said") and not isinstance(error, FileNotFoundError):
            raise  # the store does not answer: whether the checkpoint is whole is not known
        return False


class Keep(NamedTuple):
    """The number of checkpoints that a folder keeps.

    owns: () -> whether the folder is the run's that saves. Then no checkpoint is newer than its last one. None: anyone
    may save there.
    """

    count: int
    owns: Callable[[], bool] | None = None


def remove_older(path: Path, keep: Keep) -> None:
    """Remove old checkpoints of a folder, so that `keep.count` checkpoints stay.

    `path` always stays, and counts as one of them. With an owner, checkpoints of higher steps are what an earlier owner
    wrote last, and are removed. The list is made before the owner is asked: what a newer owner writes is not in it.
    """
    found = steps_in(path.parent)
    last = int(path.name.removeprefix("step-")) if keep.owns else max(found, default=0)
    others = (found[n] for n in sorted(found, reverse=True) if found[n] != path and n <= last)
    stays = list(itertools.islice(filter(is_whole, others), keep.count - 1))
    if keep.owns is not None and not keep.owns():
        return
    for old in found.values():
        if old != path and old not in stays:
            remove(old)
    flush(path.parent)


def remove_all(folder: Path, owns: Callable[[], bool]) -> None:
    """Remove the checkpoints of a folder, the newest last, if it is the run's when the list is made."""
    found = sorted(steps_in(folder).items())
    for _, path in found if owns() else ():
        remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint, but nothing else with such a name.

    The manifest is removed first, so that half a checkpoint is not taken for a checkpoint.
    """
    with contextlib.suppress(OSError):
        if not is_folder(path):
            with open_file("funcrec.save", path) as file:
                is_ours = is_checkpoint(file)
            if is_ours:
                path.unlink()
            return
        names = [x.name for x in path.iterdir()]
        parts = [n for n in names if OURS.fullmatch(n) or n.endswith(SUFFIX)]
        if MANIFEST in names:
            (path / MANIFEST).unlink()
        elif parts != names:  # a killed save leaves only parts; a folder with other files is not ours
            return
        for name in parts:
            (path / name).unlink()
        path.rmdir()
