"""A training run publishes to servers: it writes deltas to a folder, and notifies running servers.

server's weights = export(state at the version that it names)          bit for bit, at every version

The log of the state knows the rows that changed. A run that begins, or a run without a log, writes whole weights.
"""

import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from funcrec.core import Count, PositiveMagnitude, Problem, check, describe, fail, is_wrapped, replace, sure, typed
from funcrec.files import INDEX, Url, path_or_url, write_folder
from funcrec.history import ChangedIds, ChangedRows, Delta, Logged, delta
from funcrec.kinds import DynamicTables
from funcrec.mesh import Mesh, P, pmax, shard_map, unshard
from funcrec.serve._manifest import MANIFEST
from funcrec.serve._package import Package
from funcrec.serve._weights import FILE, write_weights
from funcrec.serve.freshness._delta import changes_of, described, shared_problems
from funcrec.serve.freshness._delta_file import write_file
from funcrec.serve.freshness._lock import Hold, UrlHold
from funcrec.serve.freshness._published import DELTA, WEIGHTS, tidy, version_of
from funcrec.serve.freshness._push import Address, update_server
from funcrec.sharding import buckets_of, gather_tables, with_whole_rest
from funcrec.tables import Params, layout_in
from funcrec.train import TrainState

CALL = "funcrec.publish"


class Folder(NamedTuple):
    """The folder that a run publishes to, and the manifest of its package."""

    path: Any  # a Path or a Url
    manifest: Mapping
    keep: int
    run: str


class Last(NamedTuple):
    """The last publication.

    log: the version and the origin of the log at that time; None without a log. deltas: the number of deltas since the
    newest whole weights.
    """

    step: int
    version: str
    log: tuple[int, int] | None
    deltas: int


@typed
def publish(
    folder: str | os.PathLike[str],
    package: Package | str | os.PathLike[str],
    *,
    every_steps: Count,
    keep: Count = 16,
    servers: Sequence[Address] = (),
    timeout_s: PositiveMagnitude = 10.0,
    mesh: Mesh | None = None,
) -> Callable[[Any], None]:
    """Return a callback of `fit` that publishes the weights of a step, so that servers get them soon after this step.

    It writes to `folder` after every `every_steps` steps and after each epoch. With a step of `fr.logged` (`steps=0` is
    enough) it writes a delta from the version before: the rows that changed, and the dense parameters. It writes whole
    weights at first, after every `keep` deltas, and each time if there is no log. Each entry is written whole or not at
    all, and its name has number, step and run. `Package.follow` and `update_server` find the files that lead from any
    version to the newest.

    Args:
      folder: a folder for one model, and one publisher at a time, or the URL of one in a store. It is made if it is
        missing. A new run continues with whole weights, because a killed run leaves the changed rows unknown. In one
        process the newest publisher takes over the folder, and the older publisher is refused. A store has no locks:
        there the newest publisher of all processes takes over. Of two that publish at once, one is refused before it
        writes, because only one can create the object that claims the next number. hf:// has no such claim.
      package: the package that servers run, or its folder. It states how tables are stored and which parameters are
        read.
      every_steps: the number of steps of the run between two publications.
      keep: the number of newest deltas that stay. A server that lacks more deltas begins with whole weights.
      servers: the `--admin` addresses of `funcrec-serve` processes that read `folder` as their `--updates`:
        "http://127.0.0.1:8081", or "unix:/run/admin". Each server gets the files that it lacks, one after the other. If
        a server cannot be reached, the callback warns, training goes on, and the server gets its files the next time.
      timeout_s: how long to wait for an answer of a server. Training waits for it.
      mesh: the mesh of a sharded state. Every rank calls, all ranks' rows are gathered, and the first rank writes.

    Returns:
      a function of a `fr.loop.Record`, for `fit(callbacks=[...])`. In a loop of your own, call this function:
      `tell(fr.loop.Record("step", epoch, step, {}, state))`. After you restore a state, call
      `tell(fr.loop.Record("begin", epoch, step, {}, state))`, as `fit` does: it then writes whole weights next. It also
      writes whole weights if a step is not later than the last reported step, and for a log that was started again, as
      after `fr.reshard`. It does not notice a state that was restored with its log and trained past that step before
      the state is reported. Then rows that only the abandoned steps changed keep the values of these steps.

    Raises:
      ValueError, NotADirectoryError: if the path cannot be the path of a folder.
      ValueError: from its callback, if another publisher writes to the folder, or if the folder belongs to another
        package.
      ValueError, TypeError: from its callback, if the state has several members or learned scales, or if it lacks
        parameters that the package reads.
      OSError: from its callback, if the folder cannot be written.

    Law: weights of any published version equal those of `fr.export` of the parameters at that step, bit for bit,
      whichever of these files lead to them. Tables quantised with a `key` are rounded to the nearest instead.

    Cost: a delta costs what `fr.delta` costs, and a file of the changed rows. Whole weights cost a copy of all tables.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> model = fr.models.lr((fr.TableConfig("item", 4, 1),), (fr.FeatureConfig("item", table="item"),))
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]]}), torch.tensor([0.0, 1.0]))
      >>> kind = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=1.0)}
      >>> step = fr.logged(fr.train_step(model, **kind), steps=0)
      >>> state = step.init(model.init(fr.key(0)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     package = fr.load_package(fr.export(model.apply, state.params, batch, folder + "/model", version="0"))
      ...     tell = fr.publish(folder + "/published", package, every_steps=1)
      ...     done = fr.fit(step, state, [batch], epochs=3, callbacks=[tell])
      ...     package.follow(folder + "/published")
      >>> package.version[:17], torch.allclose(package(batch), model.apply(done.state.params, batch))
      ('0000000002-step-3', True)
    """
    where = where_of(folder)
    check(CALL, folder_problems(where, servers))
    manifest, _ = described(CALL, package)
    names = [t["name"] for t in manifest["tables"]]
    check(CALL, shared_problems(manifest, names))
    there, run = Folder(where, manifest, keep, secrets.token_hex(3)), []
    own, seen = (there.run, manifest["digest"]), []
    hold = UrlHold(CALL, where, *own) if isinstance(where, Url) else Hold(CALL, where, *own)

    def write(record: Any) -> None:
        check(CALL, record_problems(record))
        if record.is_chief and (not seen or record.when == "begin"):
            hold.keep()  # this raises before training if nothing can be published
        now = record.step, record.when == "epoch"  # the end of an epoch comes after its last step
        if record.when == "begin" or (seen and now <= seen[-1]):
            run.clear()
        seen[:] = [now]
        is_due = record.when == "epoch" or (record.when == "step" and record.step % every_steps == 0)
        if not is_due or (run and run[-1].step == record.step):
            return
        if record.is_chief:
            hold.keep()
        number = hold.next_number() if record.is_chief else 0
        for last in publications(there, record, number, run[-1] if run else None, mesh):
            run[:] = [last]  # `last` is on disk
            hold.used()
        if record.is_chief:
            update_servers(servers, there.path, timeout_s)

    return write


def publications(there: Folder, record: Any, number: int, last: Last | None, mesh: Mesh | None) -> Iterator[Last]:
    """Yield each due publication once it is written: a delta, whole weights, or both of one version."""
    logged = record.state if isinstance(record.state, Logged) else None
    state = cast(Any, record.state if logged is None else logged.state)
    check(CALL, state_problems(state, mesh))
    mesh = mesh if layout_in(state.tables) is not None else None
    now = None if logged is None or logged.log.origin is None else (int(logged.log.version), int(logged.log.origin))
    log, before = None if last is None else last.log, None
    if now is not None and log is not None and log[1] == now[1] and log[0] <= now[0]:
        before = last
    count = 0 if before is None else before.deltas + 1
    version = version_of(number, record.step, there.run)
    if before is not None:
        changed = gathered(delta(sure(logged), sure(before.log)[0], mesh=mesh), state.tables, mesh)
        tables = state.tables if mesh is None else without_rows(state.tables, mesh)
        if record.is_chief:
            changes = changes_of(CALL, there.manifest, changed.to("cpu"), Params(tables, state.dense).to("cpu"))
            path = there.path / (version + DELTA)
            write_file(CALL, path, there.manifest["digest"], before.version, version, changes)
        yield Last(record.step, version, now, count)
    if before is None or count >= there.keep:
        tables = state.tables if mesh is None else gather_tables(state.tables, mesh)
        if record.is_chief:
            changes = changes_of(CALL, there.manifest, whole(tables).to("cpu"), Params(tables, state.dense).to("cpu"))
            tensors = {n: c.values for n, c in changes.items()}
            write_folder(CALL, there.path / (version + WEIGHTS), lambda own: write_weights(own, tensors, version))
        yield Last(record.step, version, now, 0)
    if record.is_chief:
        tidy(there.path, there.keep, there.run)


def update_servers(servers: Sequence[str], folder: Path, timeout_s: float) -> None:
    for address in servers:
        try:
            update_server(address, folder, timeout_s=timeout_s)
        except (OSError, ValueError) as error:
            warnings.warn(f"{CALL}: {error}", stacklevel=2)


def whole(tables: Mapping[str, Tensor]) -> Delta:
    """Return a Delta with all rows of all tables."""
    part = lambda x: ChangedRows(torch.arange(x.shape[0], device=x.device), x, 0, tuple(x.shape))
    return Delta({n: (part(x),) for n, x in tables.items()}, torch.tensor(0))


def without_rows(tables: Any, mesh: Mesh) -> Mapping:
    """Return what sharded tables have besides their rows, whole on every rank."""
    return with_whole_rest(tables, mesh).rest if isinstance(tables.rest, DynamicTables) else {}


def gathered(changed: Delta, tables: Any, mesh: Mesh | None) -> Delta:
    """Return the Delta with the changed rows of all real ranks, each row once, on every rank."""
    if mesh is None or mesh.is_emulated:
        return changed
    shards, out = tables.layout.shards, {n: [] for n in changed.tables}
    own = [[p for p in changed.tables[s.table] if p.first == s.first] for s in shards]
    for s, parts in zip(shards, own, strict=True):
        like = tables[tables.layout.banks[s.bank].name]
        rows = torch.cat([p.rows for p in parts] or [torch.empty(0, dtype=torch.int64)])
        values = torch.cat([p.values for p in parts] or [like.new_empty(0, s.last - s.first)])
        rows, values = gathered_rows([rows, values], mesh)
        out[s.table].append(ChangedRows(rows, values, s.first, dict(tables.layout.shapes)[s.table]))
    ids = changed.vocabularies
    if buckets_of(tables):
        ids = {n: gathered_ids(x, mesh) for n, x in sure(ids).items()}
    return replace(changed, tables={n: tuple(x) for n, x in out.items()}, vocabularies=ids)


def gathered_ids(own: ChangedIds, mesh: Mesh) -> ChangedIds:
    """Return the changed entries of the parts of a vocabulary on all ranks."""
    rows, tags, entries = gathered_rows([own.rows, own.tags, own.entries], mesh)
    changed = replace(own, rows=rows, tags=tags, entries=entries)
    if own.buckets is None or own.misses is None:  # both, or neither
        return changed
    buckets, misses = gathered_rows([own.buckets, own.misses], mesh)
    return replace(changed, buckets=buckets, misses=misses)


def gathered_rows(own: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    """Return tensors [M, ...] of all ranks by ascending numbers, which the first tensor has, each number once."""
    largest = shard_map(lambda x: pmax(x, mesh.axis_names), mesh=mesh, in_specs=P(), out_specs=P(), check=False)
    missing = int(largest(torch.tensor([own[0].shape[0]]))) - own[0].shape[0]
    fill = lambda x, value: torch.cat([x, x.new_full((missing, *x.shape[1:]), value)])
    padded = [fill(x, 0 if i else -1) for i, x in enumerate(own)]
    rows, *rest = (unshard(x, P(mesh.axis_names), mesh=mesh) for x in padded)
    ordered, order = rows.sort(stable=True)
    kept = order[(ordered >= 0) & torch.cat([ordered[:1] >= 0, ordered[1:] != ordered[:-1]])]
    return [rows[kept], *(x[kept] for x in rest)]


# -- validators --------------------------------------------------------------------------------------------------


def where_of(folder: str | os.PathLike) -> Any:
    """Return the Url of a folder in a store, or an absolute path."""
    text, need, hint = os.fspath(folder), "a folder, or where one can be made", '"runs/published"'
    if not isinstance(text, str):
        fail(CALL, "`folder` is not a path.", got=describe(text), need="a str or a Path", hint=hint, kind=TypeError)
    if not text or "\0" in text:
        fail(CALL, "`folder` names no folder.", got=repr(text), need=need, hint=hint)
    found = path_or_url(CALL, folder, "folder")
    return found if isinstance(found, Url) else Path(os.path.abspath(found))


def folder_problems(path: Path | Url, servers: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem unless the path is a folder, or a folder can be made there."""
    need, hint = "a folder, or where one can be made", '"runs/published"'
    if isinstance(path, Url):
        first, is_folder = path, not path.is_file()
    else:
        first = next(x for x in (path, *path.parents) if os.path.lexists(x))
        is_folder = first.is_dir()
    if not is_folder:
        yield Problem("`folder` is a file, or lies below one.", repr(str(first)), need, hint, NotADirectoryError)
    elif any((path / x).exists() for x in (MANIFEST, FILE, INDEX)):
        need = "a folder of its own, which servers read as their updates"
        yield Problem("`folder` is a package, or holds weights.", repr(str(path)), need, hint)
    elif servers and isinstance(path, Url):
        need, hint = "a folder that the servers read", "servers=(), and packages that follow the URL"
        yield Problem("`servers` read no stores.", f"{path}", need, hint)


def record_problems(record: Any) -> Iterator[Problem]:
    if not all(hasattr(record, x) for x in ("when", "step", "state", "is_chief")):
        hint = 'fr.loop.Record("step", epoch, step, {}, state)'
        yield Problem("the callback did not get a Record.", describe(record), "what fit gives", hint, TypeError)


def state_problems(state: Any, mesh: Mesh | None) -> Iterator[Problem]:
    if not isinstance(state, TrainState):
        need, hint = "a TrainState, or a Logged", "the state of fr.logged(fr.train_step(...))"
        yield Problem("the state is not a training state.", describe(state), need, hint, TypeError)
    elif state.step.dim() or is_wrapped(state.step):
        what, hint = "there are several states.", "fr.tree.map(lambda x: x[0], state), of the member that is served"
        yield Problem(what, f"`step` {describe(state.step)}", "one", hint, TypeError)
    elif layout_in(state.tables) is not None and mesh is None:
        yield Problem("the state lies on a mesh.", "no `mesh`", "that mesh", "fr.publish(..., mesh=mesh)", TypeError)
