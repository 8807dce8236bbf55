"""The folder that `publish` writes: numbered deltas, each from the number before, and sometimes whole weights.

weights(n) = weights(w) with deltas w + 1, ..., n applied in order        w <= n: the number of the newest whole weights

0000000012-step-200-3fa9c1.delta      from number 11 to number 12 of the run 3fa9c1
0000000012-step-200-3fa9c1.weights    all weights of number 12
.publisher-0000000012                 in a store: the publisher of number 12
"""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from funcrec.core import fail
from funcrec.files import SUFFIX, Url, is_whole_folder, reason, remove_folder

DELTA, WEIGHTS = ".delta", ".weights"
NAME = re.compile(r"((\d{10,})-step-\d+-([0-9a-f]{6}))(\.delta|\.weights)?")
CLAIM = re.compile(r"\.publisher-(\d{10,})")
TRIES = 3  # attempts of a reader whose files are removed meanwhile


class Piece(NamedTuple):
    """One entry of the folder. `run` identifies its writer."""

    number: int
    run: str
    version: str
    kind: str


def piece_of(name: str) -> Piece | None:
    found = NAME.fullmatch(name)
    return Piece(int(found[2]), found[3], found[1], found[4] or "") if found else None


def claim_name(number: int) -> str:
    return f".publisher-{number:010d}"


def claim_of(name: str) -> int:
    """Return the number that the object of this name claims; -1 if it is no claim."""
    found = CLAIM.fullmatch(name)
    return int(found[1]) if found else -1


def pieces(folder: Path | Url) -> list[Piece]:
    """Return the entries by number. Among entries of one number, the weights come last."""
    found = (p for p in (piece_of(x.name) for x in folder.iterdir()) if p is not None and p.kind)
    return sorted(p for p in found if p.kind == DELTA or is_whole_folder(path_of(folder, p)))


def version_of(number: int, step: int, run: str) -> str:
    return f"{number:010d}-step-{step}-{run}"


def path_of(folder: Any, piece: Piece) -> Any:
    return folder / (piece.version + piece.kind)


def route(call: str, folder: Path, version: str | None) -> list[Path]:
    """Return the files that lead from `version` to the newest: deltas, or whole weights and the deltas after them."""
    try:
        found = pieces(folder)
    except OSError as error:
        got, need = reason(error), "the folder that fr.publish writes to"
        fail(call, f"`{folder}` cannot be read.", got=got, need=need, hint='"runs/published"', kind=type(error))
    deltas = {p.number: p for p in found if p.kind == DELTA and p.run == found[-1].run}
    own = piece_of(version or "")
    bases = [p for p in reversed(found) if p.kind == WEIGHTS and p.run == found[-1].run]
    starts = ([own] if own and found and own.run == found[-1].run else []) + bases
    for base in starts:
        behind = range(base.number + 1, found[-1].number + 1)
        if base.number <= found[-1].number and all(n in deltas for n in behind):
            first = [path_of(folder, base)] if base.kind else []
            return first + [path_of(folder, deltas[n]) for n in behind]
    missing = [(b, n) for b in starts for n in range(b.number + 1, found[-1].number + 1) if n not in deltas]
    if missing:
        base, number = missing[0]
        got = f"no delta to number {number}, and the newest is {found[-1].number}"
        need = f"every delta after {base.version}, which is {'whole weights' if base.kind else 'the version to update'}"
        hint = "the files that were removed; or new whole weights: fr.publish(folder, package)"
        fail(call, f"`{folder}` lacks a delta.", got=got, need=need, hint=hint, kind=FileNotFoundError)
    need, hint = "whole weights and the deltas after them", "a publisher that has begun: fr.publish(folder, package)"
    fail(call, f"`{folder}` has no weights.", got=f"{len(found)} files", need=need, hint=hint, kind=FileNotFoundError)


def follow(call: str, folder: Path, version: str | None, take: Callable[[Path], None]) -> None:
    """Call take(path) for each file that leads from weights of `version` to the newest.

    If `take` refuses a file, or the file is removed meanwhile, continue with whole weights that avoid this file.
    """
    failed: dict[Path, Exception] = {}
    for _ in range(TRIES):
        paths, version = route(call, folder, version), None
        for path in paths:
            if path in failed:
                raise failed[path]
        try:
            for path in paths:
                take(path)
            return
        except (FileNotFoundError, ValueError) as error:
            failed[path] = error
    raise failed[path]


def tidy(folder: Path, keep: int, run: str) -> None:
    """Remove files of killed publishers, and files that a reader at most `keep` deltas late does not need.

    Do nothing unless the newest file is of this run: a newer run owns the folder. What a newer run writes stays, too.
    """
    found = pieces(folder)
    if not found or found[-1].run != run:
        return
    newest = found[-1]
    base = max((p.number for p in found if p.kind == WEIGHTS and p.run == run), default=0)
    for p in found:
        is_needed = p.number > min(base, newest.number - keep) if p.kind == DELTA else p.number == base
        if p.run != run or not is_needed:
            remove(path_of(folder, p))
    for x in list(folder.iterdir()):
        part = piece_of(x.name)  # in a store, a killed publisher leaves a folder without its index
        is_old = part is not None and part.run != run and part.number <= newest.number
        if x.name.endswith(SUFFIX) or is_old or 0 <= claim_of(x.name) < newest.number:
            remove(x)


def remove(path: Path | Url) -> None:
    """Remove a file or a folder, so that a reader finds all of it or nothing."""
    with contextlib.suppress(OSError):
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink()
