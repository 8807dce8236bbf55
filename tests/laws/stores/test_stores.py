"""A store in a file holds what the store in memory holds, after any calls, and after it is opened again."""

import os
import threading
from contextlib import contextmanager

import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from programs.store_calls import EVERY, NUM_ROWS, after, generated, is_same, steps

import funcrec as fr

INITS = {"zeros": None, "rows": lambda rows: rows[:, None].float().expand(-1, 3) / 4}


class Calls(RuleBasedStateMachine):
    """Random calls of both stores. Closing and opening the file again is a rollback."""

    @initialize(name=st.sampled_from(list(INITS)), durable=st.booleans())
    def begin(self, name, durable):
        self.init, self.durable = INITS[name], durable
        self.path = self.folder / str(len(list(self.folder.iterdir())))
        self.memory = fr.memory_store(NUM_ROWS, 3, init=self.init)
        self.file = self.opened()

    def opened(self):
        return fr.file_store(self.path, NUM_ROWS, 3, init=self.init, durable=self.durable)

    @rule(seed=st.integers(0, 2**30), count=st.integers(0, 200))
    def write(self, seed, count):
        for store in (self.memory, self.file):
            store.write(*generated(seed, count))

    @rule(step=st.integers(0, 3))
    def commit(self, step):
        self.memory.commit(step)
        self.file.commit(step)

    @rule()
    def rollback(self):
        assert self.memory.rollback() == self.file.rollback()

    @rule(step=st.sampled_from([0, 1]))
    def return_to_a_step(self, step):
        """Both return to the commit of a step, or neither has it."""
        done = []
        for store in (self.memory, self.file):
            try:
                done.append(store.rollback(step))
            except ValueError:
                done.append(None)
        assert done[0] == done[1]

    @rule()
    def open_again(self):
        self.file.close()
        self.file = self.opened()
        self.memory.rollback()

    @rule(seed=st.integers(0, 2**30), count=st.integers(0, 20))
    def read(self, seed, count):
        rows, _ = generated(seed, count)
        is_same(self.file.read(rows), self.memory.read(rows))

    @invariant()
    def every_record_is_the_same(self):
        if hasattr(self, "file"):
            is_same(self.file.read(EVERY), self.memory.read(EVERY))

    def teardown(self):
        self.file.close()


def test_a_file_holds_what_memory_holds(tmp_path):
    """After any writes, commits, rollbacks and openings a store in a file has the records of the store in memory."""
    Calls.folder = tmp_path
    case = Calls.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
    case().runTest()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**30), st.integers(0, 200), st.sampled_from([1, 3, 16]), st.booleans())
def test_both_implementations_move_the_same_bytes(tmp_path_factory, seed, count, workers, is_dropped):
    """One implementation reads the records that the other writes, in runs and alone, by any number of workers, from
    the page cache and from the disk."""
    from funcrec.kernels.records import read_records, write_records

    rows, records = generated(seed, count)
    rows, place = rows.unique(), torch.arange(len(rows.unique()))
    path = tmp_path_factory.mktemp("records") / "file"
    for name, other in (("cpp", "reference"), ("reference", "cpp")):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.truncate(fd, NUM_ROWS * 12)
        write_records(fd, rows, records[place], workers=workers, implementation=name)
        found = torch.full((NUM_ROWS, 3), torch.nan)
        if is_dropped:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read_records(fd, EVERY, found, workers=workers, implementation=other)
        os.close(fd)
        is_same(found, torch.zeros(NUM_ROWS, 3).index_copy(0, rows, records[place]))


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
def test_records_that_cannot_be_moved_raise(implementation, tmp_path):
    """A file that ends before a record, an error of the system, and records of other rows raise."""
    from funcrec.kernels.records import read_records, write_records

    path, rows, records = tmp_path / "file", torch.tensor([0, 3]), torch.zeros(2, 3)
    path.write_bytes(bytes(3 * 12))
    fd, how = os.open(path, os.O_RDONLY), {"implementation": implementation}
    with pytest.raises(EOFError, match="the file ends before a record"):
        read_records(fd, rows, records, **how)
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_records(fd, rows, records, **how)
    for wrong in (torch.zeros(3, 3), torch.zeros(2), torch.zeros(3, 2).t()):
        with pytest.raises(ValueError, match="rows and records do not fit"):
            read_records(fd, rows, wrong, **how)
    os.close(fd)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_records_of_each_dtype_keep_their_bits(dtype, tmp_path):
    """A record comes back with its dtype and its bits, NaN included."""
    records = torch.randint(0, 255, (4, 5 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    for store in (fr.memory_store(9, 5, dtype=dtype), fr.file_store(tmp_path / "rows", 9, 5, dtype=dtype)):
        store.write(torch.tensor([8, 0, 3, 4]), records)
        assert torch.equal(store.read(torch.tensor([8, 0, 3, 4])).view(torch.uint8), records.view(torch.uint8))


def test_no_row_reads_and_writes_nothing(tmp_path):
    """Calls without rows return no record and change none."""
    for store in (fr.memory_store(9, 5), fr.file_store(tmp_path / "rows", 9, 5)):
        store.write(torch.empty(0, dtype=torch.int64), torch.empty(0, 5))
        assert store.read(torch.empty(0, dtype=torch.int64)).shape == (0, 5)


def test_threads_take_turns(tmp_path):
    """Threads that read see whole records while another writes and commits."""
    store, seen = fr.file_store(tmp_path / "rows", 64, 3), []
    rows = torch.arange(64)

    def read():
        for _ in range(60):
            found = store.read(rows)
            seen.append(bool((found == found[0, 0]).all()))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for t in readers:
        t.start()
    for i in range(60):
        store.write(rows, torch.full((64, 3), float(i)))
        store.commit(i) if i % 7 == 0 else None
    for t in readers:
        t.join()
    assert len(seen) == 120 and all(seen)


@pytest.mark.parametrize("durable", [True, False])
def test_a_store_returns_to_the_commit_before(tmp_path, durable):
    """The step of the commit before undoes the last commit, in an open store and after it was closed. Earlier steps are
    refused, and so is a second return; both change nothing."""
    opened = lambda: fr.file_store(tmp_path / "rows", NUM_ROWS, 3, durable=durable)
    for store, is_file in ((fr.memory_store(NUM_ROWS, 3), False), (opened(), True)):
        for _ in steps(store):
            pass
        if is_file:
            store.close()
            store = opened()
        with refused(ValueError, "is not the step of a commit", "3 or 2"):
            store.rollback(1)
        assert store.rollback(2) == 2
        is_same(store.read(EVERY), after(2))
        for step in (3, 1):
            with refused(ValueError, "is not the step of a commit"):
                store.rollback(step)
        store.write(*generated(5, 30))
        assert store.rollback(2) == store.rollback() == 2
        is_same(store.read(EVERY), after(2))
        store.close()


# -- what is refused -----------------------------------------------------------------------------------------------


@contextmanager
def refused(kind, *words):
    with pytest.raises(kind) as found:
        yield
    assert all(w in str(found.value) for w in words), str(found.value)


def test_files_that_were_cut_are_refused(tmp_path):
    """A store whose records were cut does not open, and an open one raises where it reads beyond them."""
    store = fr.file_store(tmp_path / "rows", 9, 2)
    store.write(torch.tensor([1]), torch.ones(1, 2))
    os.truncate(tmp_path / "rows" / "records", 4)
    with refused(OSError, "the file of records was cut", "9 records"):
        store.read(torch.tensor([1]))
    store.close()
    with refused(ValueError, "records` was cut", "got   4 bytes", "need  72 bytes"):
        fr.file_store(tmp_path / "rows", 9, 2)


@pytest.mark.parametrize("init", [lambda rows: torch.ones(3), lambda rows: torch.ones(1, 2).double(), lambda rows: 3])
def test_first_records_of_another_form_are_refused(init):
    """`init(rows)` gives a record of the store's form for each row."""
    with refused(ValueError, "`init(rows)` are not the records", "torch.float32[1, 2]"):
        fr.memory_store(5, 2, init=init).read(torch.tensor([1]))


def test_bad_calls_are_refused_and_change_nothing(tmp_path):
    """Rows outside the store, records of another form and tracked tensors are refused before any write."""
    row, record = torch.tensor([1]), torch.ones(1, 3)
    for store in (fr.memory_store(5, 3), fr.file_store(tmp_path / "rows", 5, 3)):
        with refused(IndexError, "outside the store", "0 <= row < 5"):
            store.write(torch.tensor([1, 5]), torch.ones(2, 3))
        with refused(TypeError, "do not fit"):
            store.write(row, record.double())
        with refused(TypeError, "do not fit"):
            store.write(row, torch.ones(2, 3))
        with refused(ValueError, "tracked by a transform", "detach"):
            store.write(row, record.clone().requires_grad_())
        with refused(ValueError, "tracked by a transform"):
            torch.func.vmap(lambda r, store=store: store.read(r[None]))(row)
        with refused(TypeError, "not rows"):
            store.read(torch.tensor([1.0]))
        with refused(TypeError, "not a tensor"):
            store.read([1])
        with refused(ValueError, ">= 0"):
            store.commit(-1)
        assert not store.read(torch.arange(5)).any()


def test_a_closed_store_is_refused(tmp_path):
    """No function of a closed store works, in memory as in a file."""
    rows, records = torch.tensor([0]), torch.ones(1, 3)
    for store in (fr.memory_store(5, 3), fr.file_store(tmp_path / "rows", 5, 3)):
        store.close()
        calls = (store.read, rows), (store.write, rows, records), (store.commit, 1), (store.rollback,)
        for call, *words in calls:
            with refused(ValueError, "closed"):
                call(*words)
        store.close()


def test_a_folder_of_another_store_is_refused(tmp_path):
    """A folder is opened with its own form and its own first records only, by one store at a time."""
    path, init = tmp_path / "rows", lambda rows: rows[:, None].float().expand(-1, 3)
    store = fr.file_store(path, 5, 3, init=init)
    with refused(ValueError, "open already"):
        fr.file_store(path, 5, 3, init=init)
    store.close()
    with refused(ValueError, "closed"):
        store.read(torch.tensor([0]))
    with refused(ValueError, "`num_rows`", "`width`"):
        fr.file_store(path, 6, 4)
    with refused(ValueError, "`init`"):
        fr.file_store(path, 5, 3)
    (path / "store.json").write_text((path / "store.json").read_text().replace('"step": 0', '"step": 1'))
    with refused(ValueError, "was changed"):
        fr.file_store(path, 5, 3, init=init)
    (tmp_path / "other").mkdir()
    with refused(FileNotFoundError, "is not a store"):
        fr.file_store(tmp_path / "other", 5, 3)


def test_a_forked_process_is_refused(tmp_path):
    """A child that was forked cannot use its parent's store."""
    store = fr.file_store(tmp_path / "rows", 5, 3)
    child = os.fork()
    if not child:
        try:
            store.read(torch.tensor([0]))
        except ValueError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_records_larger_than_memory_are_refused():
    """A store in memory whose records do not fit raises a MemoryError that names their bytes, and a file."""
    with pytest.raises(MemoryError, match=r"(?s)do not fit into memory.*2251799813685248 bytes.*fr.file_store"):
        fr.memory_store(2**40, 256)


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    """If there is no room for the journal, the write raises, and the store keeps its records."""
    store = fr.file_store(tmp_path / "rows", NUM_ROWS, 3)
    store.write(*generated(1, 30))
    before = store.read(EVERY)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with refused(OSError, "is full"):
            store.write(EVERY, torch.ones(NUM_ROWS, 3))
    is_same(store.read(EVERY), before)
    with refused(OSError, "is full"), monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        fr.file_store(tmp_path / "more", NUM_ROWS, 3)
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("implementation", ["reference", "cpp"])
def test_a_store_runs_on_both_implementations(tmp_path, implementation):
    """`ops.using` names the implementation that moves the records."""
    with ops.using(implementation):
        store = fr.file_store(tmp_path / "rows", NUM_ROWS, 3)
        for _ in steps(store):
            pass
        store.rollback()
        is_same(store.read(EVERY), after(3))
