"""Programs of `fr.jit` with guarded buffers, compared with eager mode: `make sanitize`, or

    PYTHONPATH=tests python -m programs.sanitize_jit --mode guard   [--kind arithmetic] [--count 10000]
    the code that users run, each buffer between pages without access (guard_pages.cpp)
    PYTHONPATH=tests python -m programs.sanitize_jit --mode address [--kind arithmetic] [--count 1000]
    the same with the compiler's checks of addresses, of shifts, of quotients and of C++ arrays

Both modes are needed. With the address sanitizer, g++ compiles undefined arithmetic differently: loops that leave their
arrays without the sanitizer stay inside when it is on. The sanitizer also checks no masked vectors, which end AVX-512's
loops. Its probes therefore use the smallest instruction set. Guard pages miss an access within the buffer's page.

Kinds: arithmetic, programs of integers drawn from a number; cells, every function under every transform in the tests'
tables; steps, lookups and training steps that write into small tables. One program of `fr.jit` has 25 to 100 cases of
arithmetic (15 to 25 with the address sanitizer), or 3 to 8 cases of another kind. It runs on 1, 2 or 4 threads.
Inductor's instruction sets here take turns.

First, deliberate faults must be found: a loop one step too long, and arithmetic without funcrec's replacements. A
failing batch is halved, in new processes, and the failing case's shell command is printed. Then the exit status is 1.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODES = ("guard", "address")
CHECKS = ("fsanitize=address,shift-exponent,integer-divide-by-zero,bounds", "fno-omit-frame-pointer", "g1")
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "OMP_WAIT_POLICY": "passive"}
FINDING = re.compile(r"runtime error:|ERROR: AddressSanitizer|AddressSanitizer:DEADLYSIGNAL|guard pages: ")
IN_A_PROCESS = 8  # batches in a process, because compiled code stays in memory
LIMIT_S = 1200  # the greatest time between two output lines of a process


class Batch(NamedTuple):
    """Cases that are one program of `fr.jit`."""

    kind: str
    numbers: list[int]
    threads: int
    capability: str  # the value of ATEN_CPU_CAPABILITY: "avx512", "avx2" or "default"

    def line(self, mode: str) -> str:
        numbers = ",".join(map(str, self.numbers))
        return (
            f"PYTHONPATH=tests python -m programs.sanitize_jit --mode {mode} --kind {self.kind} --only {numbers} "
            f"--threads {self.threads} --capability {self.capability}"
        )


class Net(NamedTuple):
    """How to start processes: the mode, the processes' environment, and a folder for compiled code."""

    mode: str
    environment: dict[str, str]


# -- outside: processes and what they say ------------------------------------------------------------------------------


@contextlib.contextmanager
def net(mode: str) -> Iterator[Net]:
    """Prepare the libraries that are loaded first, and a cache that no other process reads."""
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory(prefix="sanitize_jit_") as place:
        if mode == "guard":
            first = [str(Path(place, "guard_pages.so"))]
            source = str(Path(__file__).with_name("guard_pages.cpp"))
            subprocess.run([compiler, "-O1", "-g1", "-shared", "-fPIC", "-pthread", source, "-o", *first], check=True)
        else:
            command = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
            first = [subprocess.run(c, capture_output=True, text=True, check=True).stdout.strip() for c in command]
        own = {
            "LD_PRELOAD": " ".join(first),
            "TORCHINDUCTOR_CACHE_DIR": place,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        }
        yield Net(mode, {**os.environ, **OPTIONS, **own})


class Outcome(NamedTuple):
    """What a process found. done: number of ended batches. wrong: (number, difference). report: of an early end."""

    done: int
    wrong: list[tuple[int, str]]
    report: str
    refused: set[int]


def watch(net: Net, batches: list[Batch]) -> Outcome:
    """Run a process with these batches, all for one instruction set, and return its outcome."""
    command = [sys.executable, "-m", "programs.sanitize_jit", "--mode", net.mode, "--inside", json.dumps(batches)]
    environment = {**net.environment, "ATEN_CPU_CAPABILITY": batches[0].capability}
    done, refused, wrong = 0, set(), {}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        timer, is_late = None, threading.Event()
        for line in process.stdout:
            if timer is not None:
                timer.cancel()
            timer = threading.Timer(LIMIT_S, lambda: (is_late.set(), process.kill()))
            timer.daemon = True
            timer.start()
            name, *rest = json.loads(line)
            done += name == "done"
            if name == "refused":
                refused.add(rest[0])
            if name == "wrong":
                wrong.setdefault(*rest)
        status = process.wait()
        if timer is not None:
            timer.cancel()
        errors.seek(0)
        said = errors.read()
    is_found = status or done < len(batches) or FINDING.search(said)
    how = f"no line in {LIMIT_S} s, ended from outside" if is_late.is_set() else f"exit {status}"
    return Outcome(done, [*wrong.items()], f"{how}\n{excerpt(said)}" if is_found else "", refused)


def excerpt(said: str, most: int = 30) -> str:
    """Return the lines from the first finding on, or else the last lines."""
    lines = said.splitlines()
    at = next((i for i, line in enumerate(lines) if FINDING.search(line)), max(0, len(lines) - most))
    return "\n".join(lines[at : at + most])


def run(net: Net, batches: list[Batch]) -> list[str]:
    """Return the findings of batches. The batches after one that ends the process run in a new process."""
    found = []
    while batches:
        outcome = watch(net, batches)
        for number, how in outcome.wrong:
            batch = next(b for b in batches if number in b.numbers)
            found.append(shown(named(net, batch, number, how)))
        if outcome.report and outcome.done < len(batches):
            of_one = culprits(net, batches[outcome.done])
            found += [shown(f"{b.line(net.mode)}\n{report}") for b, report in of_one]
        elif outcome.report:
            found.append(shown(f"{len(batches)} batches, of which each ended\n{outcome.report}"))
        count = sum(len(b.numbers) for b in batches[: outcome.done])
        print(
            f"  {count} of {batches[0].capability}, {len(outcome.refused)} refused, {len(found)} findings", flush=True
        )
        batches = batches[outcome.done + 1 :]
    return found


def shown(text: str) -> str:
    print(text, flush=True)
    return text


def named(net: Net, batch: Batch, number: int, how: str) -> str:
    """Return the command of a case that differs: alone, or with its batch if the case alone does not differ."""
    alone = batch._replace(numbers=[number])
    outcome = watch(net, [alone])
    is_alone = outcome.wrong or outcome.report
    return f"{(alone if is_alone else batch).line(net.mode)}\n{number} differs from eager: {how}"


def culprits(net: Net, batch: Batch) -> list[tuple[Batch, str]]:
    """Return the smallest parts of a batch that end a process, with their reports. Each part runs in a new process."""
    half = len(batch.numbers) // 2
    parts = [batch.numbers[:half], batch.numbers[half:]] if half else []
    found = []
    for part in (batch._replace(numbers=p) for p in parts):
        if watch(net, [part]).report:
            found += culprits(net, part)
    return found or [(batch, watch(net, [batch]).report)]


def probes(net: Net, kinds: list[str]) -> list[str]:
    """Return the deliberate faults that were not found. Mode "address" tries the faults of addresses on the smallest
    instruction set. The fault of arithmetic needs the largest set, because g++ may compile it right without vectors."""
    names, missed = ("past", "far", "bare"), []
    is_parted = net.mode == "address" and len(kinds) > 1
    groups = {kinds[-1]: names[:2], kinds[0]: names[2:]} if is_parted else {kinds[0]: names}
    for capability, own in groups.items():
        found = found_of(net, Batch("arithmetic", [0], 1, capability), own)
        for probe in own:
            print(f"  fault {probe!r}: {'found' if probe in found else 'MISSED'}", flush=True)
        missed += [probe for probe in own if probe not in found]
    return missed


def found_of(net: Net, batch: Batch, names: tuple[str, ...]) -> set[str]:
    """Return the faults that were found, each in a fork of one process."""
    command = [sys.executable, "-m", "programs.sanitize_jit", "--mode", net.mode, "--inside", json.dumps([batch])]
    environment = {**net.environment, "ATEN_CPU_CAPABILITY": batch.capability}
    limit_s = LIMIT_S * len(names)
    done = subprocess.run(
        [*command, "--probe", ",".join(names)], env=environment, stdout=subprocess.PIPE, text=True, timeout=limit_s
    )
    found, is_wrong = set(), False
    for what, *rest in map(json.loads, done.stdout.splitlines()):
        is_wrong |= what == "wrong"
        if what == "probed":
            probe, is_finding = rest
            found |= {probe} if is_finding or (probe == "bare" and is_wrong) else set()
            is_wrong = False
    return found


def capabilities() -> list[str]:
    """Return the instruction sets for which Inductor may compile on this machine, the largest first."""
    import torch

    best = torch.backends.cpu.get_cpu_capability().lower()
    known = ["avx512", "avx2", "default"]
    return known[known.index(best) :] if best in known else ["default"]


def batches_of(mode: str, kind: str, numbers: list[int], size: int, threads: int, kinds: list[str]) -> list[Batch]:
    """Return the numbers split into batches. The first number draws the size and threads of a batch."""
    out, least, most = [], *((25, 100) if kind == "arithmetic" else (3, 8))
    if mode == "address":  # g++ takes minutes for a long program with its checks
        least, most = min(least, 15), min(most, 25)
    while numbers:
        draw = random.Random(numbers[0])
        count, drawn = size or draw.randint(least, most), draw.choice([1, 1, 2, 4])
        out.append(Batch(kind, numbers[:count], threads or drawn, kinds[len(out) % len(kinds)]))
        numbers = numbers[count:]
    return out


def launch(asked: argparse.Namespace) -> int:
    """Run the probes, then all batches in `jobs` processes at once."""
    begin, kinds = time.monotonic(), [asked.capability] if asked.capability else capabilities()
    numbers = [int(n) for n in asked.only.split(",")] if asked.only else range(asked.first, asked.first + asked.count)
    batches = batches_of(
        asked.mode, asked.kind, list(numbers), len(numbers) if asked.only else asked.batch, asked.threads, kinds
    )
    with net(asked.mode) as own, ThreadPoolExecutor(asked.jobs) as pool:
        if not asked.only and (missed := probes(own, kinds)):
            print(f"{asked.mode}: faults made on purpose are not found: {', '.join(missed)}")
            return 1
        groups = []
        for k in kinds:
            of_one = [b for b in batches if b.capability == k]
            groups += [of_one[i : i + IN_A_PROCESS] for i in range(0, len(of_one), IN_A_PROCESS)]
        found = [text for texts in pool.map(lambda group: run(own, group), groups) for text in texts]
    end = time.monotonic() - begin
    print(f"{asked.mode}: {len(numbers)} of {asked.kind}, {len(found)} findings, {end:.0f} s", flush=True)
    return int(bool(found))


# -- inside: one process of the net ------------------------------------------------------------------------------------


def print_now(*what) -> None:
    print(json.dumps(what), flush=True)


def inside_forks(mode: str, batches: list[Batch], names: list[str]) -> None:
    """Run `inside` for each fault in a fork of this process, which imports once what all of them need."""
    for name in ("funcrec.compile.backend._inductor", "torch._inductor.compile_fx"):
        importlib.import_module(name)
    for probe in names:
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            if (child := os.fork()) == 0:
                os.dup2(said.fileno(), 2)
                try:
                    inside(mode, batches, probe)
                finally:
                    os._exit(1)
            os.waitpid(child, 0)
            said.seek(0)
            print_now("probed", probe, bool(FINDING.search(said.read())))


def inside(mode: str, batches: list[Batch], probe: str) -> None:
    first = os.environ.pop("LD_PRELOAD")  # the compiler must run without the sanitizer
    import torch
    from torch._inductor import cpp_builder

    from funcrec.compile.backend import _inductor

    if mode == "address":
        own = cpp_builder._get_optimization_cflags
        cpp_builder._get_optimization_cflags = lambda *a, **k: with_checks(*own(*a, **k))
    if probe == "bare":
        _inductor.wrapping = list  # Inductor keeps its own functions
    elif probe:
        source = _inductor.source
        _inductor.source = lambda code: re.sub(r"\((6|38|48)L\)", lambda n: f"({int(n[1]) + 1}L)", source(code))
    print_now("begin")
    for batch in batches:
        torch.set_num_threads(batch.threads)
        check_parts(faults(probe) if probe else cases_of(batch.kind, batch.numbers))
        print_now("done")
    if mode == "guard" and not ctypes.CDLL(first).guarded_buffers():
        raise SystemExit("no buffer of torch's was among the guarded ones")


def with_checks(flags: list[str], links: list[str]) -> tuple[list[str], list[str]]:
    return [*flags, *CHECKS], links


class Case(NamedTuple):
    """A case: f(*inputs) returns a tree. If is_donated, the first input is donated, and f runs again on the results of
    the first run. close: rtol and atol of `assert_trees_close` for floats. None requires equal bits."""

    number: int
    f: object
    inputs: tuple
    close: dict | None = None
    is_donated: bool = False
    name: str = ""


def cases_of(kind: str, numbers: list[int]) -> list[Case]:
    if kind == "arithmetic":
        import funcrec as fr
        from programs.jit_arithmetic import function, program

        made = [program(n) for n in numbers]
        return [Case(p.number, function(p.text), (fr.key(p.number), *p.inputs)) for p in made]
    from programs import jit_cells

    return [jit_cells.case(kind, n) for n in numbers]


def faults(probe: str) -> list[Case]:
    """Return programs whose compiled code `inside` makes wrong."""
    import torch

    import funcrec as fr

    if probe != "bare":
        size = {"past": 38, "far": 48}[
            probe
        ]  # six elements after the last vector (38), and vectors up to a page's start (48)
        return [Case(0, lambda x: x * 3 + 1, (torch.arange(size),))]
    hashed = lambda n: lambda k: ((torch.arange(n) * -4658895280553007687 + k) >> 58) & 63
    count = lambda n: lambda k: k.new_zeros(64).scatter_add(0, hashed(n)(k), k.new_ones(n))
    drawn = lambda n: (
        lambda k: fr.data.take(fr.data.random_rows(k, {"a": 1000}, ids_per_bag=2), torch.arange(n)).ids.values
    )
    keys = lambda n: lambda k: torch.func.vmap(lambda i: fr.fold_in(k, i))(torch.arange(n))
    fs = [keys(300), count(300), drawn(200)]
    fs += [lambda k: (k * 3) // 3, lambda k: (k * k).abs(), lambda k: k - 2**62 - 2**62 < k]
    return [Case(i, f, (fr.key(3),)) for i, f in enumerate(fs)]


def check_parts(cases: list[Case]) -> None:
    """Run `check`. If `check` raises, try each half of the cases, down to the cases that raise."""
    try:
        check(cases)
    except Exception as error:  # any error, because every error is reported
        if len(cases) == 1:
            how = re.search(r"error: .*", str(error)) or re.match(r"(?s).*", str(error))  # prefer the compiler's error
            how = f"{cases[0].name} it raises {type(error).__name__}: {' '.join(how[0].split())[:300]}"
            return print_now("wrong", cases[0].number, how.strip())
        half = len(cases) // 2
        check_parts(cases[:half])
        check_parts(cases[half:])


def check(cases: list[Case]) -> None:
    """Run all cases as one program of `fr.jit`, twice, and compare each with eager mode."""
    import funcrec as fr

    refused: dict[int, str] = {}

    def each(donated: list, inputs: list) -> list:
        return [attempted(c, (*d, *x), refused) for c, d, x in zip(cases, donated, inputs, strict=True)]

    donated = [list(c.inputs[:1]) if c.is_donated else [] for c in cases]
    inputs = [list(c.inputs[len(d) :]) for c, d in zip(cases, donated, strict=True)]
    jitted = fr.jit(each, donate=("donated",))
    eager = [copied(d) for d in donated]
    for _ in range(2):
        wanted = [attempted(c, (*d, *copied(x)), {}) for c, d, x in zip(cases, eager, inputs, strict=True)]
        got = jitted(copied(donated), inputs)
        for c, a, b in zip(cases, got, wanted, strict=True):
            if how := difference(a, b, c.close):
                how = refused.get(c.number, how)[:500]
                print_now("refused" if c.number in refused else "wrong", c.number, f"{c.name} {how}".strip())
        donated = [[a[0]] if c.is_donated else [] for c, a in zip(cases, got, strict=True)]
        eager = [[b[0]] if c.is_donated else [] for c, b in zip(cases, wanted, strict=True)]


def attempted(case: Case, inputs: tuple, refused: dict):
    """Return f(*inputs), or [] if f refuses, as some transforms do, or if staging it would read a value."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    try:
        return case.f(*inputs)
    except (TypeError, ValueError, NotImplementedError, RuntimeError, DataDependentOutputException) as error:
        if case.close is None:  # integers are never refused
            raise
        refused[case.number] = f"{type(error).__name__}: {error}"
        return []


def copied(x):
    import funcrec as fr

    return fr.tree.map(lambda y: y.clone(), x)


def difference(got, wanted, close: dict | None) -> str:
    """Return where two trees differ, on one line, or "" if the trees are equal."""
    from funcrec.core._tree import tree_leaves
    from funcrec.testing import assert_trees_close

    try:
        assert_trees_close(got, wanted, **(close or {"rtol": 0.0, "atol": 0.0}))
    except AssertionError as error:
        return " ".join(str(error).split())
    return "" if len(tree_leaves(got)) == len(tree_leaves(wanted)) else "another number of leaves"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, default="guard")
    parser.add_argument("--kind", choices=("arithmetic", "cells", "steps"), default="arithmetic")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", default="", help="these numbers, as one program: 3,17")
    parser.add_argument("--batch", type=int, default=0, help="cases in a program; 25 to 100, by its first number")
    parser.add_argument("--threads", type=int, default=0, help="torch's; 1, 2 or 4, by the first number")
    parser.add_argument("--capability", default="", help="avx512, avx2 or default; each in turn")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--inside", default="")
    parser.add_argument("--probe", default="")
    asked = parser.parse_args()
    if asked.inside:
        batches = [Batch(*b) for b in json.loads(asked.inside)]
        inside_forks(asked.mode, batches, asked.probe.split(",")) if asked.probe else inside(asked.mode, batches, "")
        return 0
    return launch(asked)


if __name__ == "__main__":
    sys.exit(main())
