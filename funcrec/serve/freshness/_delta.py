"""Freshness: the changes of training steps, written as a file that a running server can apply.

package(since).apply(write_delta(delta(logged, since), ...)) = export(present parameters)        bit for bit
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, has_tracked, typed
from funcrec.files import Url, path_or_url, read_folder
from funcrec.history import ChangedIds, ChangedRows, Delta
from funcrec.kernels import ops
from funcrec.kernels.vocabulary import SLOTS
from funcrec.serve._manifest import read_manifest
from funcrec.serve._package import Package
from funcrec.serve._weights import DTYPES, Version, named, params_problems, read_index
from funcrec.serve.freshness._delta_file import Change, write_file

CALL = "funcrec.write_delta"


@typed
def write_delta(
    path: str | os.PathLike[str],
    delta: Delta,
    package: Package | str | os.PathLike[str],
    params: Any,
    *,
    version: Version,
    since: Version | None = None,
) -> Path:
    """Return the path of a file with the changes of a package's weights, for `package.apply` here or in a server.

    Args:
      path: the path of the file. It is written whole or not at all.
      delta: `fr.delta(logged, since=...)`, where `since` is the step of the package's parameters. It holds the changed
        rows of tables, and changed entries of vocabularies. The file stores rows as the package does, in the dtype of
        `fr.quantize`, rounded to the nearest number.
      package: a Package, or the folder of a package.
      params: a tree like the exported tree, for every parameter without rows in `delta`: dense parameters change at
        every step. Leaves that are tables of `delta` are not read, so `fr.Params({}, state.dense)` suffices. Tables
        with vocabularies also have a key: pass `state.params`. With None,
        the server keeps every parameter without rows in `delta`, and so combines new rows with old dense weights.
      version: the name of the new weights.
      since: the name of the weights before. The default is the version of `package`.

    Returns:
      the path.

    Raises:
      ValueError, TypeError: if a parameter is in neither `delta` nor `params`, or has another shape or dtype; or if
        several parameters of the package have the name of a table of `delta`, as in a model and its average.

    Law: weights with the delta applied equal those of `fr.export` of the newer parameters, bit for bit.

    Cost: it writes the rows of `delta`, and the tensors of `params`.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> clicked = fr.FeatureConfig("clicked", table="item")
      >>> pooled = lambda params, batch: fr.lookup(params.tables, batch.ids, [clicked]).values.sum(1)
      >>> predict = lambda params, batch: pooled(params, batch) * params.dense["w"]
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"clicked": [[0, 2], [2]]}), torch.ones(2))
      >>> kind = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
      >>> step = fr.logged(fr.train_step(lambda p, b: predict(p, b).sum(), **kind), steps=0)
      >>> run = step.init(fr.Params({"item": torch.zeros(3, 1)}, {"w": torch.ones(())}))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     params = fr.Params(run.state.tables, run.state.dense)
      ...     package = fr.load_package(fr.export(predict, params, batch, folder + "/model", version="0"))
      ...     run, _ = step(run, batch)
      ...     rest = fr.Params({}, run.state.dense)
      ...     package.apply(fr.write_delta(folder + "/1.delta", fr.delta(run), package, rest, version="1"))
      >>> package(batch), package.version
      (tensor([-3., -2.]), '1')
    """
    manifest, now = described(CALL, package)
    since = now if since is None else since
    where = path_or_url(CALL, path)
    check(CALL, path_problems(where), step_problems(since, version))
    changes = changes_of(CALL, manifest, delta, params)
    write_file(CALL, where, manifest["digest"], since, version, changes)
    return where


def described(call: str, package: Package | str | os.PathLike) -> tuple[Mapping, str]:
    """Return (manifest, version) of a package or of its folder."""
    if isinstance(package, Package):
        return package.manifest, package.version
    return read_folder(call, package, lambda folder: (read_manifest(call, folder), read_index(call, folder)[2]))


def changes_of(call: str, manifest: Mapping, delta: Delta, params: Any) -> dict[str, Change]:
    """Return the changes of the parameters of a package, in their order, as the package stores them.

    They are rows for the tables of `delta`, and whole tensors for other parameters.
    """
    check(call, shared_problems(manifest, delta.tables))
    check(call, shared_id_problems(manifest, delta.vocabularies or {}))
    wanted, tables = {p["name"]: p for p in manifest["params"]}, {}
    for table in manifest["tables"]:
        if table["param"] is not None and table["name"] in delta.tables:
            tables[table["param"]] = {**table, "dtype": wanted[table["param"]]["dtype"]}
    given = {} if params is None else named(params)
    ids: dict[str, Change] = {}
    for n, own in (delta.vocabularies or {}).items():
        ids |= id_changes(n, own, wanted)
    rest = {n: x for n, x in given.items() if n in wanted and n not in tables and n not in ids}
    check(call, params_problems(rest) if rest else ())
    check(call, cover_problems(wanted, tables.keys() | ids.keys(), None if params is None else rest))
    check(call, tables_problems(delta, tables), tracked_problems(delta, rest), id_problems(delta, ids, wanted))
    changes = {n: Change(None, x) for n, x in rest.items()} | ids
    changes |= {n: rows_of(delta.tables[t["name"]], t) for n, t in tables.items()}
    return dict(sorted(changes.items()))


def params_of(vocabulary: str, seed: int, field: str, names: Collection[str]) -> list[str]:
    """Return the parameters that hold this tensor of a vocabulary."""
    path = f"vocabularies[{vocabulary!r}].{field}{f' of seed {seed}' if seed and field == 'entries' else ''}"
    return [n for n in names if n == path or n.endswith(f".{path}")]


def id_changes(vocabulary: str, own: ChangedIds, names: Collection[str]) -> dict[str, Change]:
    """Return the changes of a vocabulary's parameters."""
    made = {"entries": Change(own.rows, own.entries), "tags": Change(own.rows, own.tags), "now": Change(None, own.now)}
    if own.misses is not None and own.buckets is not None:  # both, or neither
        rows = own.buckets[:, None] * SLOTS + torch.arange(SLOTS, device=own.buckets.device)
        made["sketch"] = Change(rows.flatten(), own.misses.flatten())
    return {n: change for field, change in made.items() for n in params_of(vocabulary, own.seed, field, names)}


def blocks_of(parts: Sequence[ChangedRows]) -> list[tuple[int, Tensor, Tensor]]:
    """Return [(first column, ascending rows, values of these rows)] for each block of columns, from all its parts."""
    found: dict[tuple[int, int], list[ChangedRows]] = {}
    for p in parts:
        found.setdefault((p.first, p.values.shape[1]), []).append(p)
    out = []
    for (first, _), own in sorted(found.items()):
        rows, order = torch.cat([p.rows for p in own]).sort()
        out.append((first, rows, torch.cat([p.values for p in own])[order]))
    return out


def rows_of(parts: Sequence[ChangedRows], table: Mapping) -> Change:
    """Return the rows of one table, ascending, as the package stores them."""
    blocks = blocks_of(parts) or [(0, torch.empty(0, dtype=torch.int64), torch.empty(0, table["dim"]))]
    rows, values = blocks[0][1], torch.cat([x for _, _, x in blocks], 1).detach()
    if table["bits"] in (8, 4, 2):
        return Change(rows, ops.quantize_rows(values, table["bits"], implementation=None))
    return Change(rows, values.to(DTYPES[table["dtype"]]))


# -- validators --------------------------------------------------------------------------------------------------


def path_problems(found: Path | Url) -> Iterator[Problem]:
    if not found.name or found.is_dir():
        yield Problem("`path` does not name a file.", repr(os.fspath(found)), "the name of a file", '"runs/1.delta"')
    elif isinstance(found, Path) and not found.parent.is_dir():
        hint = "os.makedirs(folder, exist_ok=True)"
        yield Problem(
            "the folder of `path` is not there.", f"{str(found.parent)!r}", "a folder", hint, FileNotFoundError
        )


def step_problems(since: str, version: str) -> Iterator[Problem]:
    if since == version:
        need = "another name for the newer weights"
        yield Problem("`version` is already the package's.", repr(version), need, 'version="2"')


def shared_problems(manifest: Mapping, names: Collection[str]) -> Iterator[Problem]:
    """Yield problems if several parameters have the name of a table of the delta: a delta names one parameter."""
    owners: dict[str, set[str]] = {n: set() for n in names}
    for t in manifest["tables"]:
        if t["param"] is not None and t["name"] in owners:
            owners[t["name"]].add(t["param"])
    for n, own in owners.items():
        if len(own) > 1:
            got, need = ", ".join(sorted(own)), "one parameter, whose rows these are"
            hint = "an export whose models call their tables by other names; fr.save_weights of all parameters"
            yield Problem(f"several parameters are tables called {n!r}.", got, need, hint)


def shared_id_problems(manifest: Mapping, changed: Mapping[str, ChangedIds]) -> Iterator[Problem]:
    """Yield problems if several parameters are one vocabulary's: a delta names one."""
    names = [p["name"] for p in manifest["params"]]
    for n, x in changed.items():
        own = params_of(n, x.seed, "entries", names)
        if len(own) > 1:
            need, hint = "one parameter, whose entries these are", "fr.save_weights of all parameters"
            yield Problem(f"several parameters are vocabularies called {n!r}.", ", ".join(own), need, hint)


def id_problems(delta: Delta, ids: Mapping[str, Change], wanted: Mapping[str, Mapping]) -> Iterator[Problem]:
    """Yield problems if entries do not fit the vocabularies of the package."""
    for n, x in (delta.vocabularies or {}).items():
        own = [wanted[p]["shape"][0] for p in params_of(n, x.seed, "entries", ids)]
        if own and own != [x.capacity]:
            hint = "fr.delta(logged) of the model that was exported"
            yield Problem(
                f"`delta.vocabularies[{n!r}]` is of another vocabulary.", f"{x.capacity} rows", f"{own[0]}", hint
            )
    for n, c in ids.items():
        if c.values.device.type != "cpu":
            yield Problem(f"the entries of {n!r} are not on the CPU.", describe(c.values), "the CPU", 'delta.to("cpu")')


def cover_problems(wanted: Mapping, tables: Collection[str], rest: Mapping[str, Tensor] | None) -> Iterator[Problem]:
    if not tables and not rest:
        got, need = "neither rows nor parameters of it", f"some of {list(wanted)[:5]}"
        yield Problem("nothing of the package changes.", got, need, "fr.delta(logged) of the model that was exported")
        return
    if absent := [n for n in wanted if n not in tables and n not in (rest if rest is not None else wanted)]:
        hint = "fr.Params({}, state.dense), with all but the tables; None to leave them as they are"
        yield Problem(
            "`params` lack parameters without rows in `delta`.", f"no {absent[:5]}", "a tree as it was exported", hint
        )
    for n, x in (rest or {}).items():
        form = lambda dtype, shape: f"{dtype}{list(shape)}"
        got, need = form(str(x.dtype).removeprefix("torch."), x.shape), form(wanted[n]["dtype"], wanted[n]["shape"])
        if got != need:
            yield Problem(
                f"`params.{n}` is not the package's.", got, need, "the parameters that were exported, trained on"
            )


def tables_problems(delta: Delta, tables: Mapping[str, Mapping]) -> Iterator[Problem]:
    for t in tables.values():
        own, at = delta.tables[t["name"]], f"`delta.tables[{t['name']!r}]`"
        if t["name"] + ".scale" in delta.tables:
            need, hint = "rows whose scale follows from their numbers", "fr.save_weights of fr.quantize(state.tables)"
            yield Problem(f"{at} has learned scales.", f"{t['name']}.scale next to it", need, hint)
        if not isinstance(own, tuple | list) or not all(isinstance(p, ChangedRows) for p in own):
            yield Problem(f"{at} has no rows.", describe(own), "a tuple of parts", "fr.delta(logged)", TypeError)
            continue
        found = [*part_problems(at, own, t)]
        yield from found or cut_problems(at, blocks_of(own), t)


def part_problems(at: str, parts: Sequence[ChangedRows], t: Mapping) -> Iterator[Problem]:
    for p in parts:
        x = p.values
        is_inside = x.dim() == 2 and 0 <= p.first <= t["dim"] - x.shape[1]
        if p.shape != (t["rows"], t["dim"]) or not is_inside or x.shape[0] != p.rows.shape[0]:
            got = f"{describe(x)} from column {p.first} on, of a table {list(p.shape)}"
            need = f"f[M, {t['dim']}] of [{t['rows']}, {t['dim']}]"
            yield Problem(f"{at} is of another table.", got, need, "fr.delta(logged) of the model that was exported")
        elif x.device.type != "cpu" or not x.is_floating_point():
            yield Problem(f"{at} is not of floats on the CPU.", describe(x), "f[M, D]", 'delta.to("cpu")', TypeError)


def cut_problems(at: str, blocks: Sequence[tuple[int, Tensor, Tensor]], t: Mapping) -> Iterator[Problem]:
    """Yield problems unless each row occurs once, with all of its columns."""
    for _, rows, _ in blocks:
        if rows.numel() and (rows[0] < 0 or rows[-1] >= t["rows"] or not (rows[1:] > rows[:-1]).all()):
            yield Problem(f"{at} has rows twice, or outside.", f"{describe(rows)}", f"each once, below {t['rows']}")
    ends = [0, *(first + x.shape[1] for first, _, x in blocks)]
    is_whole = [*(first for first, _, _ in blocks), t["dim"]] == ends
    if blocks and not (is_whole and all(torch.equal(rows, blocks[0][1]) for _, rows, _ in blocks)):
        got = ", ".join(f"{rows.shape[0]} rows' columns {f} to {f + x.shape[1]}" for f, rows, x in blocks)
        need, hint = f"the same rows of columns 0 to {t['dim']}", "the parts of all ranks, as fr.publish gathers them"
        yield Problem(f"{at} does not have all columns of its rows.", got, need, hint)


def tracked_problems(delta: Delta, rest: Mapping) -> Iterator[Problem]:
    if has_tracked(delta, rest):
        got, need = "a tensor that grad or jvp follows", "plain tensors: a file has no derivative"
        yield Problem("an argument is being differentiated.", got, need, "x.detach()", TypeError)
