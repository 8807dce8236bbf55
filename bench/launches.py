"""Counts what one call starts on a device: kernels, copies, waits of the host; and which kernels take the time."""

from collections import Counter
from collections.abc import Callable

import torch
from measure import digits, wait_for
from torch.profiler import ProfilerActivity, profile

CALLS = 3
WAITS = ("Synchronize", "cudaEventQuery", "aten::_local_scalar_dense")  # the host waits, or reads a number


def launches(call: Callable[[], object], device: str) -> dict:
    """Return the figures of one call, as means over a few.

    kernels: started on the device (on a CPU: torch's operators). copies: between host and device. waits: of the host
    for the device. kernels_ms: the time of all kernels. top: {kernel: its share of all kernels' time}, the first six.
    """
    is_cuda = torch.device(device).type == "cuda"
    wait = wait_for(device)
    call()
    wait()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=kinds) as run:
        for _ in range(CALLS):
            call()
        wait()
    own = torch.autograd.DeviceType.CUDA if is_cuda else torch.autograd.DeviceType.CPU
    ran = [e for e in run.events() if e.device_type == own]
    copies = sum("Memcpy" in e.name for e in ran)
    waits = sum(any(w in e.name for w in WAITS) for e in run.events()) - is_cuda  # one is ours, after the calls
    times: Counter[str] = Counter()
    for e in ran:
        times[e.name] += e.self_device_time_total if is_cuda else e.self_cpu_time_total
    total = max(sum(times.values()), 1e-9)
    return {
        "kernels": digits((len(ran) - copies) / CALLS),
        "copies": digits(copies / CALLS),
        "waits": digits(max(waits, 0) / CALLS),
        "kernels_ms": digits(total / CALLS / 1e3),
        "top": {name[:60]: digits(t / total) for name, t in times.most_common(6)},
    }
