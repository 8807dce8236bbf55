"""Replays: a compiled call whose tensors all have fixed addresses, recorded once and run again as a whole.

    copy the batch into the recording's inputs;   replay: [compiled graph → writes → new dense leaves over the old];
    copy the rest out

On CUDA the recording is one CUDA graph of the whole step: no launch, no Python, no synchronisation in between. The
state keeps its memory: touched rows are written in place, and other leaves are copied over their predecessors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Recording(NamedTuple):
    """What a recorded call reads and writes.

    inputs: {leaf: the memory that stands for its own, in order}. replay:
      runs the call. returned: {output: where it is left}.
    """

    inputs: dict[int, Tensor]
    replay: Callable[[], None]
    returned: dict[int, Tensor]


def record(
    run: Callable[[list], list[Tensor]],
    leaves: Sequence,
    donated: Sequence[int],
    moved: Sequence[tuple[int, int]],
    whole: dict[int, int],
    capture: Callable,
) -> Recording:
    """Record run(leaves), which writes to donated leaves and returns results.

    Args:
      moved: (leaf, output): donated leaves whose successor is an output that is returned; it is copied into the leaf.
      whole: {output: result}.
      capture: (fn) -> (replay, fn's value): `capture_cuda`.
    """
    own = set(donated)
    # Addresses are fixed: what changes from call to call is copied into memory
    # of the recording, and donated leaves are where they were.
    inputs = {i: memory_of(x).clone() for i, x in enumerate(leaves) if isinstance(x, Tensor) and i not in own}
    fixed = [inputs[i].as_strided(x.shape, x.stride()) if i in inputs else x for i, x in enumerate(leaves)]
    succeeded = {j for _, j in moved}

    def once() -> dict[int, Tensor]:
        results = run(fixed)
        if moved:  # behind all reads: a successor that is copied over its leaf may be made of that leaf
            torch._foreach_copy_([fixed[i] for i, _ in moved], [results[whole[j]] for _, j in moved])
        return {j: results[k] for j, k in whole.items() if j not in succeeded}

    return Recording(inputs, *capture(once))


def replay(recording: Recording, leaves: Sequence) -> dict[int, Tensor]:
    """Run the recorded call for these leaves: the outputs that are returned, in memory of their own."""
    if recording.inputs:
        torch._foreach_copy_(list(recording.inputs.values()), [memory_of(leaves[i]) for i in recording.inputs])
    recording.replay()
    # the next replay writes over what this one returned
    return {j: x.clone() for j, x in recording.returned.items()}


def memory_of(x: Tensor) -> Tensor:
    """The elements from the first to the last, as they lie: a copy
    of them can be seen with x's strides, expanded ones too."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((span,), (1,))


def capture_cuda(once: Callable) -> tuple[Callable[[], None], object]:
    """One CUDA graph of a call that has run before: nearly all that it needs is compiled and loaded.

    Not all: a kernel is compiled again for tensors that begin at multiples of 16 bytes, as the recording's own do.
    Loading one is allowed in the mode "relaxed", and so is what other threads do meanwhile.
    """
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    side = _capture_stream(torch.cuda.current_device())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a recording has memory of its own
    try:  # not `torch.cuda.graph`: a signal that comes while it is entered would leave the stream recording
        torch.cuda.set_stream(side)
        graph.capture_begin(capture_error_mode="relaxed")
        out = once()
    finally:
        try:
            if torch.cuda.is_current_stream_capturing():
                graph.capture_end()
        finally:
            torch.cuda.set_stream(current)
    return graph.replay, out


def bring(leaves: list, device: torch.device) -> list:
    """The leaves with tensors of the host, best in pinned memory, copied to the device on a stream of their own.

    The copy overlaps with what the device is doing: the current stream waits for it only where the tensors are read.
    """
    on_host = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.device.type == "cpu"]
    if not on_host:
        return leaves
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    out = list(leaves)
    with torch.cuda.stream(side):
        for i in on_host:
            out[i] = leaves[i].to(device, non_blocking=True)
    current.wait_stream(side)
    for i in on_host:
        out[i].record_stream(current)
    return out


@functools.cache
def _capture_stream(device: int) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)


@functools.cache
def _side_stream(device: torch.device) -> "torch.cuda.Stream":
    """The device's stream for copies, one for all calls: each stream keeps memory of its own."""
    return torch.cuda.Stream(device)
