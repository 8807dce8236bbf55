"""The steps of a save after the tree is encoded, in this process alone or together with other ranks.

describe (all ranks, before any work) -> copy the pieces to copy -> run: write, and then rename
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funcrec.checkpoint._asynchronous import copy_of
from funcrec.checkpoint._folder import (
    Piece,
    file_name,
    heads_of,
    make_folder,
    pieces_of,
    read_manifest,
    whole_pieces,
    write_manifest,
    write_rank,
)
from funcrec.checkpoint._format import write_file
from funcrec.checkpoint._rank_parts import Seen, Writers, equal_problems, told_of, where_of
from funcrec.checkpoint._steps import Keep, remove_older, step_of, step_path
from funcrec.checkpoint._tree_json import CodeError, Encoded, encode
from funcrec.core import Problem, check
from funcrec.files import write_whole
from funcrec.mesh import Mesh, Ranks, apart_problems, together

CALL = "funcrec.save"


class Job(NamedTuple):
    """The work of a save.

    path: the path of the checkpoint. pieces: the pieces of each file. run(wrote, ranks): writes the pieces, and calls
    `wrote` after each piece.
    """

    path: Path
    pieces: list[list[Piece]]
    run: Callable[[Callable[[], None], Ranks], None]
    ranks: Ranks


def job_of(path: Path, tree: Any, mesh: Mesh | None, keep: Keep | None, step: int | None, asynchronous: bool) -> Job:
    """Return the job that writes one file, or a folder with a file for each rank."""
    seen = Seen([], [], [])
    encoded = encode(tree, "tree", seen.see)
    if mesh is not None or seen.layouts:
        return folder_job(path, encoded, seen, where_of(mesh, seen), keep, step, asynchronous)
    encoded = encode(tree, "tree") if seen.shards else encoded  # without a known mesh, shards are written by value
    check(CALL, encoded.problems)
    if keep is not None:
        name = step_path(path, step_of(seen, step))
        make_folder(CALL, path)
        path = name
    pieces, code, names = whole_pieces(encoded.tensors), encoded.code, list(encoded.leaves)

    def run(wrote: Callable[[], None], ranks: Ranks) -> None:
        write_whole(CALL, path, lambda file: write_file(file, code, names, pieces, wrote))
        if keep is not None:
            remove_older(path, keep)

    return Job(path, [pieces], run, Ranks())


def folder_job(
    path: Path, encoded: Encoded, seen: Seen, where: Writers, keep: Keep | None, step: int | None, asynchronous: bool
) -> Job:
    """Return the job that writes the file of every rank, and then the manifest."""
    ranks = Ranks() if where.is_emulated else Ranks.of_group(None)

    def describe() -> dict:
        check(CALL, encoded.problems)
        name = "" if keep is None else step_path(path, step_of(seen, step)).name
        return {**told_of(encoded.leaves, where, seen), "name": name, "token": secrets.token_hex(8), "said": said}

    said = {"mesh": repr(where.sizes), "keep": repr(keep and keep.count), "asynchronous": repr(asynchronous)}
    told = together(ranks, CALL, "save its tree", describe)
    check(CALL, apart_problems([own["said"] for own in told]))
    check(CALL, equal_problems(where, seen, told))
    folder, token = (path / told[0]["name"] if told[0]["name"] else path), told[0]["token"]

    def prepare() -> None:
        for own in dict.fromkeys((path, folder)) if ranks.is_first else ():
            make_folder(CALL, own)

    together(ranks, CALL, "make the folder", prepare)
    files = [folder / file_name(rank, where.size, token) for rank in where.own]
    pieces, names = list(pieces_of(encoded.tensors, where).values()), list(encoded.leaves)
    heads, code = heads_of(encoded), encoded.code  # these hold no tensors, which the caller may donate meanwhile

    def run(wrote: Callable[[], None], ranks: Ranks) -> None:
        try:
            own = lambda: [write_rank(CALL, f, p, names, wrote) for f, p in zip(files, pieces, strict=True)]
            written = together(ranks, CALL, "write its part", own)
            of_all = [x for own in written for x in own]
            finish = lambda: write_manifest(CALL, folder, code, heads, of_all) if ranks.is_first else None
            together(ranks, CALL, "write the manifest", finish)
        except BaseException:
            forget(folder, files)
            raise
        if keep is not None and ranks.is_first:
            remove_older(folder, keep)

    return Job(folder, pieces, run, ranks)


def copy_rest(pieces: Sequence[list[Piece]], live: int) -> None:
    """Replace all pieces after the first `live` pieces by copies, in place."""
    places = [(own, i) for own in pieces for i in range(len(own))]
    for own, i in places[live:]:
        own[i] = own[i]._replace(rows=copy_of(own[i].rows))


def forget(folder: Path, files: Sequence[Path]) -> None:
    """Remove the files of an interrupted save, except files that the manifest already names."""
    named: set[str] = set()
    try:
        named = set(read_manifest(CALL, folder).files)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, CodeError):
        return
    for path in files:
        if path.name not in named:
            with contextlib.suppress(OSError):  # such as on a read-only disk: the save raises its own error
                path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a folder that is not empty holds another save
        folder.rmdir()


# -- validators --------------------------------------------------------------------------------------------------


def step_problems(keep: int | None, step: int | None) -> Iterator[Problem]:
    if step is not None and keep is None:
        need = "keep=n, the number of checkpoints that the folder keeps"
        yield Problem("`step` requires `keep`.", "keep=None", need, "keep=3")


def copy_problems(asynchronous: bool, copy_bytes: int | None) -> Iterator[Problem]:
    if copy_bytes is not None and not asynchronous:
        yield Problem("`copy_bytes` requires a copy.", "asynchronous=False", "asynchronous=True", "copy_bytes=None")
