"""The C++ kernels under the compilers' sanitizers: `make sanitize`, or

    python tests/kernels/sanitize.py --mode address [--count 100000]     reads and writes outside memory, undefined behaviour
    python tests/kernels/sanitize.py --mode thread [--count 8000]        data races

Address: every call of hostile.py once on one thread and once on two, on torch's own threads; the generated rules are built with the
sanitizers too. Inputs are memory of their own, so that one byte too far is found. Leaks are not looked for: Python ends with many.

Thread: two Python threads make calls at once, each on two kernel threads, half of them large enough to be shared out. torch is not
built with the sanitizer, which therefore does not know that an OpenMP loop of torch's ends before the next begins, and would report
every such loop. So the kernels run on their own pool, and then on a stand-in for OpenMP's entry that starts threads and joins them:
the same loop, handed out in the same way. What torch's and Python's own objects do is not reported (`ignore_noninstrumented_modules`).

First a fault is made on purpose, which must be found. Ends with 1 and the reports if there is another. `--object` takes an object that was built before, and builds none.
"""

import argparse
import ctypes
import os
import random
import re
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "libasan.so", "libubsan.so"),
    "thread": ("-fsanitize=thread", "libtsan.so"),
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0",
    "PYTHONMALLOC": "malloc",  # what Python passes is memory of its own, too
}
COUNTS = {"address": 100_000, "thread": 8_000}
FINDING = re.compile(r"runtime error:|ERROR: AddressSanitizer|WARNING: ThreadSanitizer|AddressSanitizer:DEADLYSIGNAL")
STAND_IN = """#include <thread>
#include <vector>
extern "C" __attribute__((visibility("default"))) void stand_in(void (*f)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; i++) others.emplace_back(f, data);
  f(data);
  for (std::thread& t : others) t.join();
}
"""


def build(mode: str, level: str) -> Path:
    """The object for an instruction set with pyproject.toml's own flags, but for the optimisation, and the sanitizer's."""
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    (flags,) = [m["extra-compile-args"] for m in modules if m["name"].endswith(f"._{level}")]
    flags = [{"-O3": "-O1", "-g0": "-g1"}.get(f, f) for f in flags]
    folder = ROOT / "build" / "sanitize"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stand_in.cpp").write_text(STAND_IN)
    out, sources = folder / f"{mode}_{level}.so", [ROOT / "kernels" / "csrc" / "cpu.cpp", folder / "stand_in.cpp"]
    command = [
        os.environ.get("CXX", "g++"),
        "-shared",
        "-fPIC",
        "-DFUNCREC_MODULE=sanitized",
        *flags,
        SANITIZERS[mode][0],
    ]
    subprocess.run([*command, "-fno-omit-frame-pointer", *map(str, sources), "-o", str(out)], check=True)
    return out


def launch(mode: str, count: int, given: Path | None, more: list[str]) -> int:
    """Build, make the calls in a process that begins with the sanitizer, and look at what it says."""
    from funcrec.kernels.cpp import _native

    begin = time.monotonic()
    built = given or build(mode, _native.level())
    print(f"{mode}: {built.name} after {time.monotonic() - begin:.0f} s", flush=True)
    find = lambda name: subprocess.run(
        [os.environ.get("CXX", "g++"), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    runtimes = " ".join(map(find, SANITIZERS[mode][1:]))
    environment = {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": runtimes,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
    }
    command = [
        sys.executable,
        __file__,
        "--mode",
        mode,
        "--count",
        str(count),
        "--object",
        str(built),
        "--inside",
        *more,
    ]
    if not watch([*command, "--probe"], environment, is_quiet=True)[1]:
        print(f"{mode}: a fault made on purpose is not found")
        return 1
    status, findings = watch(command, environment)
    print(f"{mode}: {findings} findings, exit {status}, {time.monotonic() - begin:.0f} s")
    return int(findings > 0 or status != 0)


def watch(command: list[str], environment: dict[str, str], is_quiet: bool = False) -> tuple[int, int]:
    """(exit status, findings) of a process, whose reports are shown."""
    out, findings = subprocess.DEVNULL if is_quiet else None, 0
    process = subprocess.Popen(
        command, env=environment, stdout=out, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    for line in process.stderr:
        findings += bool(FINDING.search(line))
        if not is_quiet:
            print(line, end="", file=sys.stderr, flush=True)
    return process.wait(), findings


# -- inside the process ------------------------------------------------------------------------------------------


def inside(mode: str, count: int, built: Path, first: int, without: list[str], is_probe: bool) -> None:
    from funcrec.kernels.cpp import _native, _rules

    del os.environ["LD_PRELOAD"]  # the compiler of generated rules is no part of this
    loaded = _native._load(str(built))
    _native.library = lambda: loaded
    _rules.FLAGS = (*_rules.FLAGS, SANITIZERS[mode][0], "-g1", "-fno-omit-frame-pointer")
    if is_probe:
        return do_wrong(mode)
    import hostile

    names = [name for name in hostile.OPERATIONS if name not in without]
    if mode == "address":
        repeat(
            lambda i: hostile.check(names[i % len(names)], i // len(names)),
            range(first, first + count),
            "calls on 1 and 2 threads",
        )
        return
    stand_in = ctypes.cast(loaded.stand_in, ctypes.c_void_p).value
    is_large = lambda seed: random.Random(seed).random() < 0.02  # as Draw has it
    large = [seed for seed in range(50 * count) if is_large(seed)]
    numbers = [seed for pair in zip(large, range(count)) for seed in pair][: count // 2]
    for name, address in (("pool", 0), ("stand-in", stand_in)):
        loaded.funcrec_start(address)
        work = lambda each, name=name: repeat(
            lambda i: hostile.check(names[i % len(names)], numbers[i]), range(each, len(numbers), 2), f"calls, {name}"
        )
        failed: list[BaseException] = []
        at_once(work, failed)
        if failed:
            raise failed[0]


def do_wrong(mode: str) -> None:
    """A fault that the sanitizer must find: a row behind the last one, or one row that two threads write."""
    import torch
    from funcrec.kernels.cpp import _native

    table, out = torch.ones(5, 3), torch.zeros(4, 3)
    rows = torch.full((4,), 5 if mode == "address" else 0)
    if mode == "address":
        pointer, dtype, num_rows, dim = _native.table(table)
        _native.call("gather_block", [1, pointer, dtype, num_rows + 1, dim, *_native.matrix(out), *_native.ints(rows)])
        return
    count = torch.tensor(4)
    numbers = [1, *_native.table(table), *_native.matrix(out), *_native.ints(rows), count.data_ptr()]
    at_once(lambda each: [_native.call("scatter_block", numbers) for _ in range(20_000)], [])


def at_once(work, failed: list) -> None:
    """work(0) and work(1) in two Python threads."""

    def guarded(each: int) -> None:
        try:
            work(each)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def repeat(call, numbers: range, what: str) -> None:
    begin = time.monotonic()
    for k, i in enumerate(numbers, 1):
        call(i)
        if k % 1000 == 0 or k == len(numbers):
            print(f"  {k} {what}, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=SANITIZERS, default="address")
    parser.add_argument("--count", type=int)
    parser.add_argument("--object", type=Path)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--without", nargs="*", default=[], help="operations to leave out")
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--probe", action="store_true", help="do wrong, which must be found")
    asked = parser.parse_args()
    how_many = asked.count or COUNTS[asked.mode]
    if asked.inside:
        inside(asked.mode, how_many, asked.object, asked.first, asked.without, asked.probe)
    else:
        sys.path[:0] = [str(ROOT), str(HERE)]
        more = ["--first", str(asked.first), *(["--without", *asked.without] if asked.without else [])]
        sys.exit(launch(asked.mode, how_many, asked.object, more))
