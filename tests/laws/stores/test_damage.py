"""Changed files, failing disks, interrupts and transforms: a store refuses them, or keeps its records."""

import errno
import os
import pathlib

import pytest
import torch
from programs.store_calls import EVERY, NUM_ROWS, after, generated, is_same, steps

import funcrec as fr
from funcrec.stores import _file_store


def opened(folder, **how):
    return fr.file_store(folder / "rows", NUM_ROWS, 3, **how)


def changed(path, at):
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 2
    path.write_bytes(data)


@pytest.mark.parametrize("at", [64, 70, 90, 100, 200])
def test_a_changed_journal_is_refused(tmp_path, at):
    """A changed block of a journal that has whole blocks after it is refused, and nothing is undone."""
    store = opened(tmp_path)
    store.write(EVERY, torch.ones(NUM_ROWS, 3))
    store.commit(1)
    for k in range(4):
        store.write(EVERY[30 * k : 30 * k + 30], torch.zeros(30, 3))
    store.close()
    journal = tmp_path / "rows" / "undo.1"
    changed(journal, at)
    with pytest.raises(ValueError, match=r"undo\.1` was changed"):
        opened(tmp_path)
    changed(journal, at)
    is_same(opened(tmp_path).read(EVERY), torch.ones(NUM_ROWS, 3))


def test_changed_flags_of_rows_are_refused(tmp_path):
    """A file of flags with a number that no store writes is refused."""
    opened(tmp_path).close()
    changed(tmp_path / "rows" / "written", 7)
    with pytest.raises(ValueError, match="written` was changed"):
        opened(tmp_path)


def test_a_flush_that_failed_is_not_forgotten(tmp_path, monkeypatch):
    """After a flush that failed a store refuses calls until it is rolled back. A system reports such a loss once."""
    store = opened(tmp_path)
    done = steps(store)
    next(done)
    store.write(*generated(7, 30))

    def fails(fd):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with pytest.raises(OSError, match="cannot be flushed"):
            store.commit(2)
    with pytest.raises(ValueError, match="interrupted"):
        store.commit(2)
    assert store.rollback() == 1
    is_same(store.read(EVERY), after(1))


@pytest.mark.parametrize("call", ["commit", "rollback", "close"])
def test_an_interrupt_closes_no_file_twice(tmp_path, monkeypatch, call):
    """After an interrupt that comes when a file was just closed, the store is rolled back as after any other."""
    store, close = opened(tmp_path), os.close
    next(steps(store))
    store.write(*generated(7, 30))

    def interrupted(fd):
        close(fd)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.close() if call == "close" else store.rollback() if call == "rollback" else store.commit(2)
    if call == "close":
        store.close()
        store = opened(tmp_path)
    assert store.rollback() == (2 if call == "commit" else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_written_record_among_others_keeps_its_bits(tmp_path, dtype):
    """A NaN comes back with its bits when the other rows of the call were never written."""
    bits = {torch.float32: 0x7F800001, torch.float16: 0x7C01, torch.bfloat16: 0x7F81}[dtype]
    record = torch.tensor([[bits]], dtype=torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)
    for store in (fr.memory_store(9, 1, dtype=dtype), fr.file_store(tmp_path / "one", 9, 1, dtype=dtype)):
        store.write(torch.tensor([4]), record)
        found = store.read(torch.tensor([7, 4, 2]))
        assert torch.equal(found[1:2].view(torch.uint8), record.view(torch.uint8))


def test_the_same_bytes_written_again_are_a_write(tmp_path):
    """A commit of the same step after a write is a new commit in both stores, also if the write changed no byte."""
    rows, records = generated(3, 20)
    for store in (fr.memory_store(NUM_ROWS, 3), opened(tmp_path)):
        store.commit(1)
        for _ in range(2):
            store.write(rows, records)
            store.commit(4)
        with pytest.raises(ValueError, match="step"):
            store.rollback(1)


def test_stores_are_made_and_committed_anywhere(tmp_path):
    """Inside of a transform or of inference mode, a store is made, committed and rolled back as outside."""
    row, record = torch.tensor([1]), torch.ones(1, 3)

    def loss(x):
        made = fr.memory_store(NUM_ROWS, 3), opened(tmp_path)
        for s in made:
            s.commit(5)
            s.rollback()
        stores.extend(made)
        return x.sum()

    stores = []
    torch.func.grad(loss)(torch.ones(2))
    stores[1].close()
    with torch.inference_mode():
        loss(torch.ones(2))
    for store in (stores[0], *stores[2:]):
        store.write(row, record)
        store.commit(6)
        store.write(row, record * 2)
        assert store.rollback() == 6
        is_same(store.read(row), record)


def test_a_return_removes_journals_one_after_the_other(tmp_path, monkeypatch):
    """A return to the commit before removes the later journal for good before it undoes the earlier one. If the later
    one came back alone after a stop of the machine, it would undo what is not there."""
    store, seen = opened(tmp_path), []
    for step in (1, 2, 3):
        store.write(*generated(step, 30))
        if step < 3:
            store.commit(step)
    unlink, write = pathlib.Path.unlink, _file_store.write_records
    monkeypatch.setattr(_file_store, "flush", lambda folder: seen.append("flush"))
    monkeypatch.setattr(_file_store, "write_records", lambda *a: (seen.append("undo"), write(*a)))
    monkeypatch.setattr(pathlib.Path, "unlink", lambda path, **how: (seen.append("remove"), unlink(path, **how)))
    assert store.rollback(1) == 1
    of_journals = seen[seen.index("undo") :]  # before comes store.json
    changes = [x for x, before in zip(of_journals, ["", *of_journals], strict=False) if x != before]
    assert changes == ["undo", "remove", "flush"] * 2


def test_a_file_too_large_is_refused(tmp_path):
    """More bytes than a file can have are refused before anything is made."""
    with pytest.raises(ValueError, match="num_rows` is too large"):
        fr.file_store(tmp_path / "large", 2**62, 4)
    assert not (tmp_path / "large").exists()
