"""The C++ kernels under the compilers' sanitizers: `make sanitize`, or

    PYTHONPATH=tests python -m programs.sanitize --mode address [--count 100000]
    reads and writes outside memory, undefined behaviour
    PYTHONPATH=tests python -m programs.sanitize --mode thread [--count 8000]        data races

Address: every call of hostile.py runs once on one thread and once on two, on torch's own threads. The generated rules
are also built with the sanitizers. Each input has its own allocation, so that an access one byte outside is found.
Leaks are not checked, because a Python process ends with many leaks.

Thread: two Python threads make calls at once, each on two kernel threads. Half of the calls are large enough for both.
torch is not built with the sanitizer. The sanitizer therefore does not see that torch's OpenMP loop ends before the
next begins, and would report every such loop. So the kernels run on their own pool, and then on a stand-in for OpenMP's
entry that starts and joins threads. The stand-in runs the same loop, divided in the same way. Races inside the
libraries of torch and Python are not reported (`ignore_noninstrumented_modules`).

First the sanitizer must find a deliberate fault. Any other fault is reported. The exit status is then 1. `--object`
takes an object that was built before, and builds no object."""

import argparse
import ctypes
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "libasan.so", "libubsan.so"),
    "thread": ("-fsanitize=thread", "libtsan.so"),
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0",
    "PYTHONMALLOC": "malloc",  # buffers that Python passes also get their own allocations
}
COUNTS = {"address": 100_000, "thread": 8_000}
FINDING = re.compile(r"runtime error:|ERROR: AddressSanitizer|WARNING: ThreadSanitizer|AddressSanitizer:DEADLYSIGNAL")
STAND_IN = """#include <thread>
#include <vector>
extern "C" __attribute__((visibility("default")))
void stand_in(void (*f)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; i++) others.emplace_back(f, data);
  f(data);
  for (std::thread& t : others) t.join();
}
"""


def build(mode: str, level: str) -> Path:
    """Return the sanitized object for an instruction set. The kernels' own CMakeLists builds the object, and the
    stand-in in the same folder."""
    folder = ROOT / "build" / f"sanitize-{mode}"
    flag, find = SANITIZERS[mode][0], os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake, environment = shutil.which("cmake", path=find), {**os.environ, "PATH": find}
    if cmake is None:
        sys.exit("sanitize.py: there is no cmake\n  try   pip install cmake ninja")
    run = lambda *command: subprocess.run([*map(str, command)], check=True, env=environment)
    what = (f"-DFUNCREC_LEVELS={level}", f"-DFUNCREC_SANITIZE={flag.removeprefix('-fsanitize=')}")
    run(cmake, "-G", "Ninja", "-S", ROOT / "kernels", "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *what)
    run(cmake, "--build", folder)
    source = folder / "csrc" / "stand_in.cpp"
    source.write_text(STAND_IN)
    command = (os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-O1", "-g1", "-pthread", flag)
    run(*command, source, "-o", source.with_suffix(".so"))
    return folder / "csrc" / f"_{level}.so"


def launch(mode: str, count: int, given: Path | None, first: int, jobs: int, more: list[str]) -> int:
    """Build, make the calls in processes that start with the sanitizer, and return the number of its reports."""
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
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, "-m", "programs.sanitize", "--mode", mode, "--object", str(built), "--inside", *more]
    for what in ("kernel", "rule"):
        if not watch([*command, "--probe", what], environment, is_quiet=True)[1]:
            print(f"{mode}: a fault made on purpose in a {what} is not found")
            return 1
    parts = [(first + count * k // jobs, count * (k + 1) // jobs - count * k // jobs) for k in range(jobs)]
    part = lambda at: watch([*command, "--first", str(at[0]), "--count", str(at[1])], environment)
    with ThreadPoolExecutor(jobs) as pool:
        statuses, findings = zip(*pool.map(part, parts), strict=True)
    print(
        f"{mode}: {count} calls, {sum(findings)} findings, exit {max(map(abs, statuses))}, "
        f"{time.monotonic() - begin:.0f} s"
    )
    return int(any(findings) or any(statuses))


def watch(command: list[str], environment: dict[str, str], is_quiet: bool = False) -> tuple[int, int]:
    """Run a process, show the sanitizer's reports, and return (exit status, findings)."""
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


def inside(mode: str, count: int, built: Path, first: int, without: list[str], probe: str | None) -> None:
    from funcrec.kernels.cpp import _native, _rules

    del os.environ["LD_PRELOAD"]  # the compiler of generated rules must run without the sanitizer
    loaded = _native._load(str(built))
    _native.library = lambda: loaded
    own = [{"-O3": "-O1", "-g0": "-g1", "-fwrapv": "-fno-wrapv"}.get(f, f) for f in _rules.FLAGS]
    _rules.FLAGS = (*own, SANITIZERS[mode][0], "-fno-omit-frame-pointer")
    if probe:
        return do_wrong(mode, probe)
    from programs import hostile

    names, rules = [name for name in hostile.OPERATIONS if name not in without], counted_rules()
    if mode == "address":
        check = lambda i: hostile.check(names[i % len(names)], i // len(names))
        repeat(check, range(first, first + count), "calls on 1 and 2 threads")
    else:
        check_at_once(hostile.check, names, count, built)
    print(f"  {rules['updates']} updates by {rules['compiled']} generated rules", flush=True)
    if "generated_update" in names and count >= 8 * len(names) and not (rules["updates"] and rules["compiled"]):
        raise SystemExit("no generated rule was among the calls")


def counted_rules() -> dict[str, int]:
    """Return counts of the rules that are compiled with the sanitizer from now on, and of the updates by these
    rules."""
    from funcrec.kernels import cpp
    from funcrec.kernels.cpp import _rules

    seen = {"compiled": 0, "updates": 0}

    def counted(name: str, call):
        def run(*args):
            seen[name] += 1
            return call(*args)

        return run

    _rules.build = counted("compiled", _rules.build)
    cpp.generated_update_ = counted("updates", cpp.generated_update_)
    return seen


def check_at_once(check, names: list[str], count: int, built: Path) -> None:
    """Make each call on the kernels' own pool, then on the stand-in. Two Python threads share the calls."""
    from funcrec.kernels.cpp import _native

    stand_in = ctypes.cast(ctypes.CDLL(str(built.with_name("stand_in.so"))).stand_in, ctypes.c_void_p).value
    is_large = lambda seed: random.Random(seed).random() < 0.02  # this draw equals the draw in Draw
    large = [seed for seed in range(50 * count) if is_large(seed)]
    numbers = [seed for pair in zip(large, range(count)) for seed in pair][: count // 2]
    for name, address in (("pool", 0), ("stand-in", stand_in)):
        _native.library().funcrec_start(address)
        work = lambda each, name=name: repeat(
            lambda i: check(names[i % len(names)], numbers[i]), range(each, len(numbers), 2), f"calls, {name}"
        )
        failed: list[BaseException] = []
        at_once(work, failed)
        if failed:
            raise failed[0]


WRONG = """extern "C" void wrong(float* row) {
  for (int i = 0; i < 1000; i++) *static_cast<volatile float*>(row) = i;
}
"""


def do_wrong(mode: str, where: str) -> None:
    """Make a fault that the sanitizer must find, in a kernel or in a rule: access a row after the last row, or write
    one row in two threads."""
    import torch
    from funcrec.kernels.cpp import _native, _rules

    table, out = torch.ones(5, 3), torch.zeros(4, 3)
    rows, count = torch.full((4,), 5 if mode == "address" else 0), torch.tensor(4)
    if where == "rule":
        wrong, row = _rules.build(WRONG).wrong, table.data_ptr() + (table.nbytes if mode == "address" else 0)
        work = lambda: wrong(ctypes.c_void_p(row))
    elif mode == "address":
        pointer, dtype, num_rows, dim = _native.table(table)
        numbers = [1, pointer, dtype, num_rows + 1, dim, *_native.matrix(out), *_native.ints(rows)]
        work = lambda: _native.call("gather_block", numbers)
    else:
        numbers = [1, *_native.table(table), *_native.matrix(out), *_native.ints(rows), count.data_ptr()]
        work = lambda: _native.call("scatter_block", numbers)
    if mode == "address":
        return work()
    at_once(lambda each: [work() for _ in range(20_000)], [])


def at_once(work, failed: list) -> None:
    """Run work(0) and work(1) in two Python threads."""

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
    parser.add_argument("--jobs", type=int, help="processes at once; two for address, one for thread")
    parser.add_argument("--without", nargs="*", default=[], help="operations to leave out")
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--probe", choices=("kernel", "rule"), help="do wrong there, which must be found")
    asked = parser.parse_args()
    how_many = asked.count or COUNTS[asked.mode]
    if asked.inside:
        inside(asked.mode, how_many, asked.object, asked.first, asked.without, asked.probe)
    else:
        jobs = asked.jobs or {"address": 2, "thread": 1}[asked.mode]
        more = ["--without", *asked.without] if asked.without else []
        sys.exit(launch(asked.mode, how_many, asked.object, asked.first, jobs, more))
