"""A store in a file is its last commit, whenever its process or its machine stops."""

import os
import signal

import pytest
import torch
from programs.store_calls import EVERY, NUM_ROWS, after, generated, is_same, steps

import funcrec as fr


class Stop(BaseException):
    """The moment at which a process ends."""


class Disk:
    """What a store's calls do to files, one change after the other. A change may be the last one, done in part."""

    def __init__(self, monkeypatch, last, part):
        self.left, self.part = last, part
        self.pwrite, self.fdatasync = os.pwrite, os.fdatasync
        from funcrec.kernels import records

        from funcrec.stores import _file_store

        self.move = records.write_records
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: self.change(self._pwrite, fd, data, at))
        monkeypatch.setattr(os, "fdatasync", lambda fd: self.change(lambda whole, fd: self.fdatasync(fd), fd))
        monkeypatch.setattr(_file_store, "write_records", lambda *a: self.change(self._write_records, *a))
        self.write_whole = _file_store.write_whole
        monkeypatch.setattr(_file_store, "write_whole", lambda *a: self.change(self._write_whole, *a))

    def change(self, do, *args):
        self.left -= 1
        if self.left < 0:
            raise Stop
        if self.left == 0:
            do(self.part, *args)
            raise Stop
        return do(1.0, *args)

    def _pwrite(self, part, fd, data, at):
        return self.pwrite(fd, memoryview(data)[: int(len(memoryview(data)) * part)], at)

    def _write_records(self, part, fd, rows, records):
        count = int(len(rows) * part)
        self.move(fd, rows[:count].contiguous(), records[:count].contiguous())

    def _write_whole(self, part, call, path, write):
        if part > 0.5:  # a file that is renamed is whole
            self.write_whole(call, path, write)


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "not durable"])
@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_a_store_that_stops_at_any_change_is_the_last_commit(tmp_path, part, durable):
    """If a process ends at its n-th change of a file, before, during or after it, the store has the records of its last
    commit when it is opened again, for every n. A commit whose call did not return may have happened."""
    for last in range(1, 200):
        path, done = tmp_path / str(last), 0
        store = fr.file_store(path, NUM_ROWS, 3, durable=durable)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, last, part)
            try:
                for step in steps(store):
                    done = step
            except Stop:
                is_over = False
            else:
                is_over = True
        store.close()
        again = fr.file_store(path, NUM_ROWS, 3, durable=durable)
        found, step = again.read(EVERY), again.rollback()
        assert step in (done, done + 1)
        is_same(found, after(step))
        again.close()
        if is_over:
            return
    raise AssertionError("the calls did not end")


def test_an_opening_that_stops_is_repeated(tmp_path):
    """If a process ends during a rollback, at any change, the store has the records of its last commit when it is
    opened again."""
    for last in range(1, 50):
        path = tmp_path / str(last)
        store = fr.file_store(path, NUM_ROWS, 3)
        for _ in steps(store):
            pass
        store.close()
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, last, 0.4)
            try:
                fr.file_store(path, NUM_ROWS, 3).close()
            except Stop:
                is_over = False
            else:
                is_over = True
        again = fr.file_store(path, NUM_ROWS, 3)
        is_same(again.read(EVERY), after(3))
        again.close()
        if is_over:
            return
    raise AssertionError("the opening did not end")


def test_a_return_that_stops_is_repeated(tmp_path):
    """If a process ends while its store returns to the commit before, at any change, the store has the records of that
    commit or of the last, whole, when it is opened again. It can still return."""
    seen = set()
    for last in range(1, 50):
        path = tmp_path / str(last)
        store = fr.file_store(path, NUM_ROWS, 3)
        for _ in steps(store):
            pass
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, last, 0.4 if last % 2 else 1.0)
            try:
                store.rollback(2)
            except Stop:
                is_over = False
            else:
                is_over = True
        store.close()
        again = fr.file_store(path, NUM_ROWS, 3)
        step = again.rollback()
        is_same(again.read(EVERY), after(step))
        assert again.rollback(2) == 2
        is_same(again.read(EVERY), after(2))
        again.close()
        seen.add(step)
        if is_over:
            assert seen == {2, 3}
            return
    raise AssertionError("the return did not end")


def test_an_interrupted_call_is_taken_back(tmp_path):
    """After an interrupted call a store refuses further calls until it is rolled back."""
    store = fr.file_store(tmp_path / "rows", NUM_ROWS, 3)
    done = steps(store)
    assert next(done) == 1
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, 6, 0.4)  # after the journal's head, a block of three parts and its flush come the records
        with pytest.raises(Stop):
            store.write(*generated(5, 30))
    for call in (lambda: store.read(EVERY), lambda: store.write(*generated(5, 30)), lambda: store.commit(2)):
        with pytest.raises(ValueError, match="interrupted"):
            call()
    assert store.rollback() == 1
    is_same(store.read(EVERY), after(1))


def write_for_ever(path, told):
    """Write and commit the step to all records, and say so, without an end."""
    torch.set_num_threads(1)
    store = fr.file_store(path, NUM_ROWS, 3)
    for step in range(store.rollback() + 1, 10**9):
        store.write(EVERY, torch.full((NUM_ROWS, 3), float(step)))
        store.commit(step)
        os.write(told, b"%12d" % step)
        store.write(EVERY, torch.full((NUM_ROWS, 3), -1.0))


def test_a_killed_process_leaves_the_last_commit(tmp_path):
    """A process that SIGKILL ends at a random moment leaves the records of its last commit, twenty times."""
    for moment in range(20):
        heard, told = os.pipe()
        child = os.fork()
        if not child:
            write_for_ever(tmp_path / "rows", told)
        os.close(told)
        for _ in range(1 + 7 * moment % 5):
            done = int(os.read(heard, 12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        rest = os.read(heard, 1 << 16)
        os.close(heard)
        done = int(rest[-12:]) if rest else done
        store = fr.file_store(tmp_path / "rows", NUM_ROWS, 3)
        step = store.rollback()
        assert step in (done, done + 1)
        is_same(store.read(EVERY), torch.full((NUM_ROWS, 3), float(step)))
        store.close()


def test_writes_that_were_not_flushed_are_not_trusted(tmp_path, monkeypatch):
    """After the machine has stopped, a store with writes that are neither flushed nor committed is refused. A durable
    store is opened, and so is one without such writes."""
    from funcrec.stores import _undo

    for durable, is_written in ((False, True), (True, True), (False, False)):
        path = tmp_path / f"{durable}{is_written}"
        store = fr.file_store(path, NUM_ROWS, 3, durable=durable)
        store.write(*generated(1, 30))
        store.commit(1)
        if is_written:
            store.write(*generated(2, 30))
        store.close()
        with monkeypatch.context() as patch:
            patch.setattr(_undo, "machine_start", lambda: "another")
            if not durable and is_written:
                with pytest.raises(ValueError, match="the machine stopped"):
                    fr.file_store(path, NUM_ROWS, 3, durable=durable)
            else:
                again = fr.file_store(path, NUM_ROWS, 3, durable=durable)
                assert again.rollback() == 1
                again.close()


class Cache:
    """A disk that keeps what was flushed. The system may have written any of the rest when the machine stops."""

    def __init__(self, monkeypatch):
        from funcrec.stores import _file_store

        self.open, self.changes = {}, []
        pwrite, fdatasync, move = os.pwrite, os.fdatasync, _file_store.write_records

        def write(fd, data, at):
            self.changes.append((os.readlink(f"/proc/self/fd/{fd}"), at, os.pread(fd, len(memoryview(data)), at)))
            return pwrite(fd, data, at)

        def records(fd, rows, own):
            size = own.shape[1] * own.itemsize
            for row in rows.tolist():
                self.changes.append((os.readlink(f"/proc/self/fd/{fd}"), row * size, os.pread(fd, size, row * size)))
            move(fd, rows, own)

        def flush(fd):
            name = os.readlink(f"/proc/self/fd/{fd}")
            self.changes = [x for x in self.changes if x[0] != name]
            fdatasync(fd)

        monkeypatch.setattr(os, "pwrite", write)
        monkeypatch.setattr(os, "fdatasync", flush)
        monkeypatch.setattr(_file_store, "write_records", records)

    def lose(self, chance, seed):
        """Undo some of the changes that were not flushed, as if they had not reached the disk."""
        draw = torch.rand(len(self.changes), generator=torch.Generator().manual_seed(seed))
        for (name, at, old), d in [*zip(self.changes, draw.tolist())][::-1]:
            if d < chance and os.path.exists(name):
                fd = os.open(name, os.O_RDWR)
                os.write(fd, b"") if not old else os.pwritev(fd, [old], at)
                os.close(fd)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 1.0])
def test_a_durable_store_survives_a_machine_that_stops(tmp_path, chance):
    """A durable store has the records of its last commit, whichever unflushed changes reached the disk."""
    for seed in range(12):
        path = tmp_path / str(seed)
        store = fr.file_store(path, NUM_ROWS, 3)
        with pytest.MonkeyPatch.context() as patch:
            cache = Cache(patch)
            for _ in steps(store):
                pass
            store.write(*generated(seed, 50))
        store.close()
        cache.lose(chance, seed)
        again = fr.file_store(path, NUM_ROWS, 3)
        is_same(again.read(EVERY), after(3))
        again.close()
