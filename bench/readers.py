"""Measures rows per second and core: funcrec's readers, pyarrow's own reader of the same columns, TorchRec's readers.

    python bench/readers.py [--rows 200000] [--rounds 15]

The seconds of a core are the CPU time of the process, over all threads, so that load on the machine does not matter.
Peers take turns in one process, and the ratios are medians over the rounds. pyarrow's own reader ends with record
batches of the columns. funcrec's reader continues to checked batches of tensors. TorchRec's Criteo pipeline reads text
with Python's csv module into rows of integers, and reads .npy arrays into batches. Memory is measured in a process that
streams a folder of Parquet files.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from measure import digits, interleave, median_ratio, record, spread
from pyarrow import csv, parquet

import funcrec as fr
from funcrec.data import Schema, batches, criteo_npy, criteo_tsv, stream_loader

BATCH, FOLDERS = 4096, (4, 40)  # examples; files in a folder
DENSE, IDS = [f"x{i}" for i in range(13)], [f"c{i}" for i in range(26)]
SCHEMA = Schema("label", dense=DENSE, categorical=IDS)


def make(folder: Path, rows: int) -> None:
    """Write the same rows as text of Criteo, as CSV, as Parquet, and as .npy arrays."""
    rng = np.random.default_rng(0)
    columns = {"label": rng.integers(0, 2, rows)}
    columns |= {n: rng.integers(0, 10_000, rows) for n in DENSE} | {n: rng.integers(0, 2**32, rows) for n in IDS}
    table = pa.table(columns)
    parquet.write_table(table, folder / "day.parquet", row_group_size=1 << 16)
    csv.write_csv(table, folder / "day.csv")
    text = {n: x if n in ("label", *DENSE) else pa.array([f"{i:08x}" for i in x]) for n, x in columns.items()}
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    csv.write_csv(pa.table(text), folder / "day.tsv", options)
    stack = lambda names, dtype: np.stack([columns[n] for n in names], 1).astype(dtype)
    np.save(folder / "dense.npy", np.log(stack(DENSE, np.float32) + 3))
    np.save(folder / "sparse.npy", stack(IDS, np.int64).astype(np.int32))
    np.save(folder / "label.npy", stack(["label"], np.int32))


def drain(made) -> None:
    for _ in made():
        pass


def cases(folder: Path) -> dict[str, dict]:
    """Return {group: {reader: a function that reads all rows}}. pyarrow's own reader comes first in each group."""
    names = ["label", *(f"int_{i}" for i in range(13)), *(f"cat_{i}" for i in range(26))]
    types = {n: pa.binary() if n.startswith("cat") else pa.int64() for n in names}
    read = lambda more: csv.ReadOptions(use_threads=False, block_size=8 << 20, **more)
    tsv, text, columnar = folder / "day.tsv", folder / "day.csv", folder / "day.parquet"
    own_tsv = lambda: csv.open_csv(
        tsv, read({"column_names": names}), csv.ParseOptions(delimiter="\t", quote_char=False),
        csv.ConvertOptions(column_types=types),
    )  # fmt: skip
    ints = csv.ConvertOptions(column_types=dict.fromkeys(SCHEMA.columns, pa.int64()))
    own_csv = lambda: csv.open_csv(text, read({}), convert_options=ints)
    loader = lambda path, key=None: stream_loader(path, SCHEMA, BATCH, key=key)
    groups = {
        "Criteo's text": {"pyarrow": own_tsv, "funcrec": lambda: criteo_tsv(tsv, BATCH)},
        "CSV": {"pyarrow": own_csv, "funcrec": loader(text)},
        "Parquet": {
            "pyarrow": lambda: parquet.ParquetFile(columnar).iter_batches(BATCH),
            "funcrec": loader(columnar),
            "funcrec, shuffled": loader(columnar, fr.key(0)),
        },
        ".npy": {},
    }
    arrays = [str(folder / f"{n}.npy") for n in ("dense", "sparse", "label")]
    groups[".npy"]["funcrec"] = lambda: batches(criteo_npy(*arrays), None, BATCH)
    try:
        from torchrec.datasets.criteo import CriteoIterDataPipe
        from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe as Arrays

        groups["Criteo's text"]["TorchRec"] = lambda: CriteoIterDataPipe([str(tsv)], row_mapper=row_of)
        given = {"stage": "train", "batch_size": BATCH, "rank": 0, "world_size": 1, "mmap_mode": True}
        groups[".npy"]["TorchRec"] = lambda: Arrays(
            dense_paths=arrays[:1], sparse_paths=arrays[1:2], labels_paths=arrays[2:], **given
        )
    except ImportError as error:
        print(f"TorchRec is absent: {error}")
    return {group: {n: functools.partial(drain, made) for n, made in c.items()} for group, c in groups.items()}


def row_of(row: list[str]) -> tuple[list[int], list[int], int]:
    """Return (integers, categories, label) of a line, parsed as `BinaryCriteoUtils.tsv_to_npys` does."""
    return [int(x or "0") for x in row[1:14]], [int(x or "0", 16) for x in row[14:40]], int(row[0] or "0")


STREAM = """
import json, pathlib, sys
import funcrec as fr
from funcrec.data import Schema, stream_loader
from measure import _status_kb

pathlib.Path("/proc/self/clear_refs").write_text("5")
before, rows = _status_kb("VmRSS"), 0
schema = Schema("label", dense=[f"x{i}" for i in range(13)], categorical=[f"c{i}" for i in range(26)])
for _, batch in stream_loader(sys.argv[1], schema, 4096, key=fr.key(0) if sys.argv[2] == "shuffled" else None)():
    rows += batch.label.shape[0]
print(json.dumps({"rows": rows, "grown_mb": (_status_kb("VmHWM") - before) / 1024}))
"""


def memory(folder: Path, order: str) -> dict:
    """Return the most that a stream of a folder adds to the resident memory of a process."""
    command = [sys.executable, "-c", STREAM, str(folder), order]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    return json.loads(out.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    figures: dict = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, given.rows)
        for group, readers in cases(folder).items():
            times = interleave(readers, rounds=given.rounds, warmup=1, clock=time.process_time)
            peer = "pyarrow" if "pyarrow" in times else "TorchRec"
            figures[group] = {
                n: {
                    "rows_per_core_s": spread([given.rows / s for s in t]),
                    f"time_of_{peer}": digits(median_ratio(t, times[peer])),
                }
                for n, t in times.items()
                if peer in times
            }
        for files in FOLDERS:
            big = folder / f"files-{files}"
            big.mkdir()
            for i in range(files):
                (big / f"{i}.parquet").symlink_to(folder / "day.parquet")
            orders = {order: memory(big, order) for order in ("in order", "shuffled")}
            whole_mb = 40 * 8 * given.rows * files / 2**20
            figures[f"folder of {files} files"] = {"in_memory_mb": digits(whole_mb), **orders}
    record("readers", {"rows": given.rows, "rounds": given.rounds, "threads": 1, **figures})


if __name__ == "__main__":
    main()
