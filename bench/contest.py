"""Runs funcrec and its peers on one case: the law first, then interleaved rounds.

    share = (bytes / time) / copied bytes per second,     ratio = time(peer) / time(funcrec)

A case whose law is red gives no number.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import bandwidth
import torch
from launches import launches
from measure import digits, interleave, peak_mb, ratios, spread, wait_for
from torch import Tensor

OURS = "funcrec"
MIN_ROUNDS = 3
CALLS = {"cpu": 1, "cuda": 10}  # calls for each measured time: on a device the host runs ahead, as in training


class Contender(NamedTuple):
    """A library on one case.

    first: () -> the results of one call on the first batch, by name. call: makes one call on the next batch.
    """

    first: Callable[[], dict[str, Tensor]]
    call: Callable[[], object]


class Closeness(NamedTuple):
    """The tolerances of |a - b| <= atol + rtol · |b|, elementwise."""

    rtol: float = 1e-4
    atol: float = 1e-5


class Setting(NamedTuple):
    """The settings of a run. rounds: the most rounds; `seconds` may allow fewer rounds, but at least three."""

    device: str = "cpu"
    threads: int = 1
    rounds: int = 21
    seconds: float = 20.0
    tiny: bool = False
    implementation: str | None = None  # the implementation of funcrec's kernels; None for the default of the device


class Traffic(NamedTuple):
    """The bytes that a call must move, each once. dim, dtype: those of the rows in the gather to compare."""

    num_bytes: int
    dim: int
    dtype: torch.dtype


def compete(
    builders: Mapping[str, Callable[[], Contender]],
    setting: Setting,
    close: Closeness = Closeness(),  # noqa: B008 (immutable)
    traffic: Traffic | None = None,
) -> dict:
    """Return the figures of one case.

    Args:
      builders: {name: builder}, in the order in which they build. The first call follows at once. If a builder raises
        ImportError, or NotImplementedError for a case that the peer cannot run, the peer is absent.
    """
    built, absent, compile_s = {}, {}, {}
    wait, firsts = wait_for(setting.device), {}
    for name, build in builders.items():
        try:
            built[name] = build()
        except (ImportError, NotImplementedError) as error:
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        began = time.perf_counter()
        firsts[name] = built[name].first()
        wait()
        compile_s[name] = digits(time.perf_counter() - began)
    red = [line for name in firsts if name != OURS for line in differences(firsts[OURS], firsts[name], name, close)]
    judged = sorted(set(firsts) - {OURS})
    figures = {"absent": absent, "law": "red" if red or not judged else "green", "judged_by": judged}
    if not judged:
        red = ["nothing to compare with"]
    if red:
        return {**figures, "red": red[:8]}
    firsts.clear()
    built.pop("reference", None)  # the reference only judges the law
    return {**figures, "first_call_s": compile_s, **timed(built, setting, traffic)}


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor], peer: str, close: Closeness) -> list[str]:
    """Return texts on how a peer's results of the first call differ from funcrec's results."""
    found = []
    for name in ours.keys() & theirs.keys():
        a, b = ours[name].detach().to(torch.float64), theirs[name].detach().to(ours[name].device, torch.float64)
        if a.shape != b.shape:
            found.append(f"{name} is {list(a.shape)}, {peer}'s {list(b.shape)}")
        elif not torch.allclose(a, b, rtol=close.rtol, atol=close.atol):
            found.append(f"{name} is {float((a - b).abs().max()):.3g} from {peer}'s")
    if not ours.keys() & theirs.keys():
        found.append(f"nothing in common with {peer}")
    return found


def repeated(call: Callable[[], object], count: int) -> Callable[[], object]:
    return call if count == 1 else lambda: [call() for _ in range(count)][-1]


def timed(built: dict[str, Contender], setting: Setting, traffic: Traffic | None) -> dict:
    wait = wait_for(setting.device)
    names = [OURS, *(name for name in built if name != OURS)]
    count = CALLS[torch.device(setting.device).type]
    calls = {name: repeated(built[name].call, count) for name in names}
    one_round = sum(min(times) for times in interleave(calls, rounds=1, warmup=2, wait=wait).values())
    rounds = max(MIN_ROUNDS, min(setting.rounds, int(setting.seconds / max(one_round, 1e-9))))
    times = interleave(calls, rounds=rounds, warmup=1, wait=wait)
    figures = {
        "rounds": rounds,
        "calls_per_round": count,
        "ms": {name: spread(t, 1e3 / count) for name, t in times.items()},
        "ratio": {name: spread(ratios(t, times[OURS])) for name, t in times.items() if name != OURS},
        "call_peak_mb": {name: peak_mb(built[name].call, setting.device) for name in names},
    }
    if torch.device(setting.device).type == "cuda" or setting.tiny:
        figures["launches"] = {name: launches(built[name].call, setting.device) for name in names}
    if traffic is None:
        return figures
    limits = bandwidth.measure(traffic.dim, traffic.dtype, setting)
    speeds = {name: digits(traffic.num_bytes / figures["ms"][name]["median"] / 1e6) for name in times}
    share = digits(speeds[OURS] / limits["copy_gb_per_s"])
    return {**figures, "bytes": traffic.num_bytes, "gb_per_s": speeds, **limits, "share_of_copy": share}
