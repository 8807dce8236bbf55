"""Measures stores of records beside key-value stores of the same records, in memory and with the page cache dropped.

    python bench/stores.py [--rows 4000000] [--count 20000]    prints a table, appends to results/stores.jsonl

Records of 65 floats (a row of 64 and one slot). Each case reads or writes `count` random rows; the cases take turns,
and the table has the medians of `--rounds` rounds. "dropped": the system's page cache holds nothing of the file before
the call. "torch.take": the same gather from a tensor in memory, the limit. A commit flushes to the disk in all stores.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import record
from torch import Tensor

import funcrec as fr

WIDTH = 65


def funcrec_store(folder: Path, rows: int, durable: bool) -> dict[str, Callable]:
    store = fr.file_store(folder / f"funcrec{durable}", rows, WIDTH, durable=durable)
    fill(store.write, rows)
    store.commit(0)
    return {"read": store.read, "write": store.write, "commit": lambda: store.commit(1), "close": store.close}


def lmdb_store(folder: Path, rows: int) -> dict[str, Callable]:
    import lmdb

    env = lmdb.open(str(folder / "lmdb"), map_size=8 * rows * WIDTH * 4, sync=False, writemap=True)

    def write(rows: Tensor, records: Tensor) -> None:
        with env.begin(write=True) as txn:
            txn.cursor().putmulti(pairs(rows, records))

    def read(rows: Tensor) -> Tensor:
        with env.begin() as txn:
            found = txn.cursor().getmulti([r.to_bytes(8, "big") for r in rows.tolist()])
        return torch.frombuffer(bytearray(b"".join(v for _, v in found)), dtype=torch.float32).view(-1, WIDTH)

    fill(write, rows)
    env.sync(True)
    return {"read": read, "write": write, "commit": lambda: env.sync(True), "close": env.close}


def rocksdb_store(folder: Path, rows: int) -> dict[str, Callable]:
    from rocksdict import Options, Rdict, WriteBatch

    db = Rdict(str(folder / "rocksdb"), Options(raw_mode=True))

    def write(rows: Tensor, records: Tensor) -> None:
        batch = WriteBatch(raw_mode=True)
        for key, value in pairs(rows, records):
            batch.put(key, value)
        db.write(batch)

    def read(rows: Tensor) -> Tensor:
        found = db[[r.to_bytes(8, "big") for r in rows.tolist()]]
        return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.float32).view(-1, WIDTH)

    fill(write, rows)
    db.flush()
    return {"read": read, "write": write, "commit": lambda: db.flush_wal(True), "close": db.close}


def pairs(rows: Tensor, records: Tensor) -> list[tuple[bytes, bytes]]:
    """Return keys, whose order is that of the rows, and values."""
    size, memory = WIDTH * 4, records.numpy().tobytes()
    return [(r.to_bytes(8, "big"), memory[i * size : (i + 1) * size]) for i, r in enumerate(rows.tolist())]


def fill(write: Callable, rows: int) -> None:
    for rows_of_part in torch.arange(rows).split(100_000):
        write(rows_of_part, rows_of_part[:, None].float().expand(-1, WIDTH).contiguous())


def memory(rows: int) -> dict[str, Callable]:
    table = torch.arange(rows)[:, None].float().expand(-1, WIDTH).contiguous()
    put = lambda rows, records: table.index_copy_(0, rows, records)
    nothing = lambda: None
    return {"read": lambda rows: table.index_select(0, rows), "write": put, "commit": nothing, "close": nothing}


STORES = {
    "torch.take": lambda folder, rows: memory(rows),
    "funcrec": lambda folder, rows: funcrec_store(folder, rows, True),
    "funcrec, not durable": lambda folder, rows: funcrec_store(folder, rows, False),
    "lmdb": lmdb_store,
    "rocksdb": rocksdb_store,
}


def drop(folder: Path) -> None:
    """Drop the files from the page cache. Pages that a process has mapped stay."""
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(call: Callable, *args) -> float:
    begin = time.perf_counter()
    call(*args)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="a folder on the disk to be measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, opened, absent = Path(name), {}, []
        for case, make in STORES.items():
            try:
                opened[case] = make(folder, options.rows)
            except ImportError:
                absent.append(case)
        times = {case: {} for case in opened}
        for k in range(options.rounds):
            g = torch.Generator().manual_seed(k)
            rows = torch.randperm(options.rows, generator=g)[: options.count].sort().values
            records = torch.randn(options.count, WIDTH, generator=g)
            want = None
            for case, store in opened.items():
                own = times[case]
                drop(folder)
                own.setdefault("read, dropped", []).append(timed(store["read"], rows))
                own.setdefault("read", []).append(timed(store["read"], rows))
                found = store["read"](rows)
                want = found if want is None else want
                assert torch.equal(found, want), case
                own.setdefault("write", []).append(timed(store["write"], rows, records))
                own.setdefault("write again", []).append(timed(store["write"], rows, records))
                own.setdefault("commit", []).append(timed(store["commit"]))
        for store in opened.values():
            store["close"]()
    medians = {case: {n: 1e3 * statistics.median(ts) for n, ts in own.items()} for case, own in times.items()}
    names = list(next(iter(medians.values())))
    print(
        f"{options.count} of {options.rows} records of {WIDTH * 4} bytes; ms\n{'':22}"
        + "".join(f"{n:>15}" for n in names)
    )
    for case, own in medians.items():
        print(f"{case:22}" + "".join(f"{own[n]:15.2f}" for n in names))
    print(*[f"{case}: absent" for case in absent], sep="\n")
    record("stores", {"rows": options.rows, "count": options.count, "ms": medians, "load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
