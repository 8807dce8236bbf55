"""A store in a file. After its process or the machine stops, its records are those of the last commit.

records      record r at bytes [r · size, (r + 1) · size)
written      u8[R]: 1 for a row that was written
undo.<c>     the old records of rows written after commit c (`_undo`)
store.json   the number c of the last commit, its step, that of the commit before, and the form of the records

write    old records to undo.<c>         ─▶  records, written
commit   flush records, written, undo.<c>  ─▶  store.json with c + 1  ─▶  remove undo.<c - 1>
open     take undo.<c> back              ─▶  remove it
return   store.json with c - 1           ─▶  take undo.<c> and undo.<c - 1> back
"""

import json
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Count, Problem, check, fail, sure, typed
from funcrec.files import as_path, crc_of, fcntl, flush, raise_os, raise_unwritten, write_folder, write_whole
from funcrec.kernels.records import read_records, write_records
from funcrec.stores._store import (
    ColdStore,
    Init,
    RecordDtype,
    as_values,
    checked_records,
    checked_rows,
    commit_problems,
    first_records,
    step_problems,
)
from funcrec.stores._undo import Undo, blocks_of, machine_start

CALL = "funcrec.file_store"
RECORDS, WRITTEN, ABOUT, JOURNAL = "records", "written", "store.json", "undo."
FORMAT = 2
WAS_WRITTEN, IS_KEPT = 1, 2  # bits of a row's flags
MOST_BYTES = 2**63 - 1


@typed
def file_store(
    path: str | os.PathLike[str],
    num_rows: Count,
    width: Count,
    *,
    dtype: RecordDtype = torch.float32,
    init: Callable[[Tensor], Tensor] | None = None,
    durable: bool = True,
) -> ColdStore:
    """Return a store whose records are in a file of the folder `path`. The folder is made, or opened if it is there.

    The room for all records is reserved when the folder is made. Opening a folder undoes the writes after the last
    commit, wherever its process was killed.

    Args:
      path: the folder. One process at a time can open it.
      num_rows, width, dtype: R, W and the dtype of the records. An existing folder must have the same.
      init: (rows i64[N], ascending) -> the records of rows that were never written; None for zeros, as for
        `memory_store`. An existing folder requires the same function; some of its rows are compared.
      durable: whether the store also survives if the machine stops, by a flush before each write. Without it, a store
        that had uncommitted writes at such a stop cannot be opened.

    Memory: a byte for each row. Reads and writes go through the system's page cache.

    Raises:
      ValueError: if the folder holds another store or something else, or if another process has it open.
      OSError: if the disk is full, or cannot be read or written.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> folder = tempfile.mkdtemp() + "/rows"
      >>> store = fr.file_store(folder, 1000, 2)
      >>> store.write(torch.tensor([7]), torch.ones(1, 2))
      >>> store.commit(1)
      >>> store.write(torch.tensor([7]), torch.zeros(1, 2))
      >>> store.close()
      >>> fr.file_store(folder, 1000, 2).read(torch.tensor([7]))
      tensor([[1., 1.]])
    """
    if not durable and not machine_start():
        fail(CALL, "this system does not report its start time.", got="durable=False", need="durable=True")
    check(CALL, size_problems(num_rows, width * dtype.itemsize))
    folder = Path(os.path.realpath(as_path(CALL, path, "folder", '"runs/rows"')))
    first = _first(init, num_rows, width, dtype)
    form = {"num_rows": num_rows, "width": width, "dtype": str(dtype).removeprefix("torch."), "first": first}
    if not folder.exists():
        write_folder(CALL, folder, lambda new: _make(new, form, num_rows * width * dtype.itemsize))
    store = _FileStore(folder, form, dtype, init, durable)
    return ColdStore(store.read, store.write, store.commit, store.rollback, store.close, num_rows, width, dtype)


class _FileStore:
    """An open folder.

    flags: u8[R]; bit 0: the row was written; bit 1: the journal has its old record. is_torn: a call was interrupted, or
    failed, between its first and its last write.
    """

    def __init__(self, folder: Path, form: dict[str, Any], dtype: torch.dtype, init: Init | None, is_durable: bool):
        self.folder, self.form, self.dtype, self.init, self.is_durable = folder, form, dtype, init, is_durable
        self.num_rows, self.width, self.size = form["num_rows"], form["width"], form["width"] * dtype.itemsize
        self.lock, self.process, self.is_torn = threading.RLock(), os.getpid(), False
        self.files: dict[str, int] = {}
        self.undo: Undo | None = None
        self.at_end = weakref.finalize(self, close_all, self.files)
        try:
            self._open()
            self.rollback()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        _about(self.folder, self.form)
        for name, size in ((RECORDS, self.size * self.num_rows), (WRITTEN, self.num_rows)):
            try:
                self.files[name] = fd = os.open(self.folder / name, os.O_RDWR)
            except OSError as error:
                raise_os(
                    CALL, error, f"`{self.folder / name}` cannot be opened.", "a file of a store", "another folder"
                )
            if (found := os.fstat(fd).st_size) != size:
                hint = "a copy of the folder"
                fail(CALL, f"`{self.folder / name}` was cut.", got=f"{found} bytes", need=f"{size} bytes", hint=hint)
        try:
            if fcntl is not None:
                fcntl.flock(self.files[RECORDS], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "close() there, or another folder"
            fail(CALL, f"`{self.folder}` is open already.", got="another open store", need="one at a time", hint=hint)

    def read(self, rows: Tensor) -> Tensor:
        rows = checked_rows("ColdStore.read", rows, self.num_rows)
        asked, order = rows.sort()
        with self.lock:
            self._check("ColdStore.read")
            found = self._stored(asked, (self.flags[asked] & WAS_WRITTEN).bool())
        return torch.empty_like(found).index_copy_(0, order, found)

    def _stored(self, rows: Tensor, is_old: Tensor) -> Tensor:
        """Return the records of ascending rows: from the file where `is_old`, else those of `init`."""
        if is_old.all():
            return self._read(rows)
        records = torch.empty(len(rows), self.width, dtype=self.dtype)
        put = lambda which, x: records.index_copy_(0, which.nonzero()[:, 0], x)  # records[mask] = x changes bits of NaN
        put(is_old, self._read(rows[is_old]))
        new, place = torch.unique_consecutive(rows[~is_old], return_inverse=True)
        put(~is_old, first_records(self.init, new, self.width, self.dtype)[place])
        return records

    def _read(self, rows: Tensor) -> Tensor:
        records = torch.empty(len(rows), self.width, dtype=self.dtype)
        try:
            read_records(self.files[RECORDS], rows, records)
        except EOFError:
            got, need = "a file that ends before a record", f"{self.num_rows} records"
            fail("ColdStore.read", "the file of records was cut.", got=got, need=need, hint="a copy", kind=OSError)
        except OSError as error:
            raise_os("ColdStore.read", error, "the records cannot be read.", "a disk that can be read", "a copy")
        return records

    def write(self, rows: Tensor, records: Tensor) -> None:
        call = "ColdStore.write"
        rows, records = checked_records(call, rows, records, self.num_rows, self.width, self.dtype)
        with self.lock:
            self._check(call)
            flags = self.flags[rows]
            self._keep_old(rows[flags & IS_KEPT == 0], flags[flags & IS_KEPT == 0])
            self.is_torn = True
            self._write(RECORDS, rows, records)
            new = rows[flags & WAS_WRITTEN == 0]
            self._write(WRITTEN, new, torch.ones(len(new), 1, dtype=torch.uint8))
            self.flags[rows] = WAS_WRITTEN | IS_KEPT
            self.is_torn = False

    def _keep_old(self, rows: Tensor, flags: Tensor) -> None:
        """Add rows to the journal; rows with an old record come first."""
        if not len(rows):
            return
        had, undo = rows[flags & WAS_WRITTEN != 0], sure(self.undo)
        rows = torch.cat([had, rows[flags & WAS_WRITTEN == 0]])
        try:
            undo.append(rows, self._read(had))
        except OSError as error:
            raise_unwritten("ColdStore.write", error, undo.path, "journal")
        self.since.append(rows)
        self.flags[rows] |= IS_KEPT

    def _write(self, name: str, rows: Tensor, records: Tensor) -> None:
        try:
            write_records(self.files[name], rows, records)
        except OSError as error:
            need, hint = "a disk that can be written", "rollback(), which gives the last commit"
            raise_os("ColdStore.write", error, "the records cannot be written.", need, hint)

    @as_values()
    def commit(self, step: int) -> None:
        call = "ColdStore.commit"
        check(call, step_problems(step))
        with self.lock:
            self._check(call)
            if step == self.step and not self.since:
                return
            about = {"format": FORMAT, "commits": self.commits + 1, "step": step, "before": self.step, **self.form}
            self.is_torn = True  # a second flush would not report what the first one lost
            self._flush()
            try:
                write_whole(call, self.folder / ABOUT, lambda file: file.write(_text(about)))
            except Exception:
                self.is_torn = _about(self.folder, self.form)["commits"] != self.commits
                raise
            self._remove_before(self.commits)
            for rows in self.since:
                self.flags[rows] &= WAS_WRITTEN
            self._begin(about)

    @as_values()
    def rollback(self, step: int | None = None) -> int:
        call = "ColdStore.rollback"
        with self.lock:
            self._check_open(call)
            about = _about(self.folder, self.form)
            steps = [x for x in (about["step"], about["before"]) if x is not None]
            check(call, commit_problems(step, steps))
            self.is_torn = True
            if step not in (None, about["step"]):
                about |= {"commits": about["commits"] - 1, "step": about["before"], "before": None}
                write_whole(call, self.folder / ABOUT, lambda file: file.write(_text(about)))
            for number in sorted(self._journals(), reverse=True):
                if number >= about["commits"]:
                    self._take_back(self.folder / f"{JOURNAL}{number}")
            self._remove_before(about["commits"] - 1)
            self.flags = torch.empty(self.num_rows, dtype=torch.uint8)
            read_records(self.files[WRITTEN], torch.arange(1), self.flags[None])
            if self.flags.max() > WAS_WRITTEN:
                got, need = "bytes above 1", "the file as it was written"
                fail(CALL, f"`{self.folder / WRITTEN}` was changed.", got=got, need=need, hint="a copy of the folder")
            self._begin(about)
            return self.step

    def _take_back(self, journal: Path) -> None:
        for rows, old in blocks_of(CALL, journal, self.size):
            had, new = rows[: len(old)].sort(), rows[len(old) :].sort().values
            self._write(RECORDS, had.values, old[had.indices])
            self._write(WRITTEN, new, torch.zeros(len(new), 1, dtype=torch.uint8))
        self._flush()
        journal.unlink()
        flush(self.folder)  # before an earlier journal goes: this one must not come back alone

    def _journals(self) -> list[int]:
        """Return the numbers of the journals in the folder."""
        return [int(path.suffix[1:]) for path in self.folder.glob(f"{JOURNAL}*")]

    def _remove_before(self, number: int) -> None:
        """Remove the journals before this one."""
        for k in self._journals():
            if k < number:
                (self.folder / f"{JOURNAL}{k}").unlink()

    def _begin(self, about: dict[str, Any]) -> None:
        """Begin at a commit, without a journal."""
        if self.undo is not None:
            self.undo.close()
        self.commits, self.step, self.since = about["commits"], about["step"], []
        self.undo = Undo(self.folder / f"{JOURNAL}{self.commits}", self.is_durable)
        self.is_torn = False

    def _flush(self) -> None:
        try:
            for fd in self.files.values():
                os.fdatasync(fd)
            if self.undo is not None:
                self.undo.flush()
        except OSError as error:
            raise_os(
                "ColdStore.commit", error, "the records cannot be flushed.", "a disk that can be written", "a copy"
            )

    def close(self) -> None:
        with self.lock:
            if self.undo is not None:
                self.undo.close()
            close_all(self.files)

    def _check_open(self, call: str) -> None:
        if not self.files:
            fail(
                call,
                "the store is closed.",
                got=f"a closed store of `{self.folder}`",
                need="an open one",
                hint="fr.file_store",
            )
        if os.getpid() != self.process:
            got, need = "a forked process", "the process that opened it"
            fail(call, "a store belongs to one process.", got=got, need=need, hint="another store in each process")

    def _check(self, call: str) -> None:
        self._check_open(call)
        if self.is_torn:
            got, need = "a store with half of a write", "a store that is whole"
            fail(
                call,
                "an earlier call was interrupted.",
                got=got,
                need=need,
                hint="rollback(), which gives the last commit",
            )


def close_all(files: dict[str, int]) -> None:
    """Close the files, so that another store can open the folder."""
    while files:
        os.close(files.popitem()[1])


def _make(folder: Path, form: dict[str, Any], size: int) -> None:
    """Fill a new folder, with room for all records."""
    for name, count in ((RECORDS, size), (WRITTEN, form["num_rows"])):
        fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(fd, 0, count)
        finally:
            os.close(fd)
    (folder / ABOUT).write_bytes(_text({"format": FORMAT, "commits": 0, "step": 0, "before": None, **form}))


def _text(about: dict[str, Any]) -> bytes:
    """Return JSON, and its CRC on a second line."""
    text = json.dumps(about).encode()
    return b"%b\n%08x\n" % (text, zlib.crc32(text))


def _about(folder: Path, form: dict[str, Any]) -> dict[str, Any]:
    """Return what store.json says, which must be of this form."""
    path = folder / ABOUT
    try:
        text, crc = path.read_bytes().split(b"\n")[:2]
    except OSError as error:
        raise_os(CALL, error, f"`{folder}` is not a store.", f"a folder with {ABOUT}", "a new folder")
    except ValueError:
        text, crc = b"", b""
    if crc != b"%08x" % zlib.crc32(text):
        fail(CALL, f"`{path}` was changed.", got="another CRC", need="the file as it was written", hint="a copy")
    about = json.loads(text)
    if about["format"] != FORMAT:
        fail(CALL, f"`{path}` has another format.", got=str(about["format"]), need=str(FORMAT), hint="a newer funcrec")
    check(CALL, form_problems(about, form))
    return about


@as_values()
def _first(init: Init | None, num_rows: int, width: int, dtype: torch.dtype) -> int | None:
    """Return the CRC of a few first records, which recognises `init`."""
    if init is None:
        return None
    rows = torch.tensor(sorted({0, num_rows // 2, num_rows - 1}))
    return crc_of(first_records(init, rows, width, dtype))


# -- validators --------------------------------------------------------------------------------------------------


def size_problems(num_rows: int, size: int) -> Iterator[Problem]:
    if num_rows * size > MOST_BYTES:
        need = f"at most {MOST_BYTES} bytes in a file"
        yield Problem("`num_rows` is too large.", f"{num_rows} records of {size} bytes", need, "several stores")


def form_problems(about: dict[str, Any], form: dict[str, Any]) -> Iterator[Problem]:
    for name in ("num_rows", "width", "dtype"):
        if about[name] != form[name]:
            yield Problem(f"`{name}` is not that of the store.", str(form[name]), str(about[name]), "another folder")
    if about["first"] != form["first"] and all(about[n] == form[n] for n in ("num_rows", "width", "dtype")):
        hint = "the init it was made with"
        yield Problem("`init` is not that of the store.", "other first records", "the same function", hint)
