"""Measures saves of tables: how long training pauses, and the memory that a save takes besides the state.

    python bench/checkpoint.py [--gb 4]     runs a process for each case, prints a table, appends to
    results/checkpoint.jsonl

"write" writes only the bytes, in system calls of the named size, and flushes: no save can be faster.
Peak: the growth of resident memory during the save, sampled every 10 ms. Pause: the time from the call to its return.
  Whole:
the time until the bytes are on disk (torch.save does not flush, so the time of an `os.sync` is added).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from measure import record

import funcrec as fr

DIM, TABLES = 64, 8
CASES = (
    "write 256 KiB", "write 16384 KiB", "torch.save", "dcp", "dcp async",
    "fr.save", "fr.save folder", "fr.save async", "fr.save async 64 MB",
)  # fmt: skip


def tables_of(gb: float) -> dict[str, torch.Tensor]:
    rows = int(gb * 1e9 / TABLES / DIM / 4)
    return {f"t{i}": torch.full((rows, DIM), float(i)) for i in range(TABLES)}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def save(case: str, tables: dict[str, torch.Tensor], path: str):
    """Save the tables, and return a function that waits for the end of the save."""
    done = lambda: None
    if case.startswith("write"):
        write(tables, path, int(case.split()[1]) << 10)
        return done
    if case == "torch.save":
        torch.save(tables, path)
        return os.sync
    if case.startswith("dcp"):
        import torch.distributed.checkpoint as dcp

        if case == "dcp":
            dcp.save(tables, checkpoint_id=path, no_dist=True)
            return done
        return dcp.async_save(tables, checkpoint_id=path, no_dist=True).result
    if case == "fr.save folder":
        fr.save(path, tables, mesh=fr.Mesh.emulated(x=2))
        return done
    if case == "fr.save":
        fr.save(path, tables)
        return done
    return fr.save(path, tables, asynchronous=True, copy_bytes=64 << 20 if "64" in case else None).wait


def write(tables: dict[str, torch.Tensor], path: str, size: int) -> None:
    with open(path, "wb", buffering=0) as file:
        for x in tables.values():
            data = memoryview(x.view(-1).numpy()).cast("B")
            for i in range(0, len(data), size):
                file.write(data[i : i + size])
        os.fsync(file.fileno())


def measure(case: str, gb: float, folder: str) -> dict[str, float]:
    tables, most, is_over = tables_of(gb), [0], threading.Event()
    before = resident()

    def watch() -> None:
        while not is_over.wait(0.01):
            most[0] = max(most[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.monotonic()
    wait = save(case, tables, f"{folder}/state")
    pause = time.monotonic() - begin
    wait()
    whole = time.monotonic() - begin
    is_over.set()
    watcher.join()
    return {"pause_s": pause, "whole_s": whole, "peak_gb": max(0, most[0] - before) / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--folder", help="a folder on the disk to be measured")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(json.dumps(measure(options.case, options.gb, folder)))
        return
    found, load = {}, [round(x, 2) for x in os.getloadavg()]
    print(f"{options.gb:g} GB of tables\n{'':22}{'pause s':>9}{'whole s':>9}{'peak GB':>9}")
    for case in CASES:
        more = ["--folder", options.folder] if options.folder else []
        command = [sys.executable, __file__, "--gb", str(options.gb), "--case", case, *more]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            print(f"{case:22}{(run.stderr.strip().splitlines() or ['failed'])[-1][:80]}")
            continue
        found[case] = got = json.loads(run.stdout.splitlines()[-1])
        print(f"{case:22}{got['pause_s']:9.2f}{got['whole_s']:9.2f}{got['peak_gb']:9.2f}", flush=True)
    record("checkpoint", {"gb": options.gb, "load": load, "cases": found})


if __name__ == "__main__":
    main()
