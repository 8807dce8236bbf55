"""Replays: a compiled call whose tensors have fixed addresses, recorded once and then run again as a whole.

    copy the batch into the recording's inputs;   replay: [compiled graph → writes → new dense leaves over the old];
    copy the rest out

On CUDA the recording is one CUDA graph of the whole step, without launches, Python or synchronisation in between. The
state keeps its memory: touched rows are written in place, and other leaves are copied over their predecessors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Recording(NamedTuple):
    """A recorded call.

    inputs: {leaf: the memory that replaces the leaf's own, in order}. replay: runs the call. returned: {output: where
    the call leaves it}.
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
    """Record run(leaves), which writes to donated leaves and returns the results.

    Args:
      moved: (leaf, output) of donated leaves whose new value is a returned output; it is copied into the leaf.
      whole: {output: result}.
      capture: (fn) -> (replay, fn's value): `capture_cuda`.
    """
    own = set(donated)
    # Addresses are fixed: values that change from call to call are copied into the recording's memory, and donated
    # leaves stay where they are.
    inputs = {i: memory_of(x).clone() for i, x in enumerate(leaves) if isinstance(x, Tensor) and i not in own}
    fixed = [inputs[i].as_strided(x.shape, x.stride()) if i in inputs else x for i, x in enumerate(leaves)]
    succeeded = {j for _, j in moved}

    def once() -> dict[int, Tensor]:
        results = run(fixed)
        if moved:  # after all reads: the new value of a leaf may be computed from that leaf
            torch._foreach_copy_([fixed[i] for i, _ in moved], [results[whole[j]] for _, j in moved])
        return {j: results[k] for j, k in whole.items() if j not in succeeded}

    return Recording(inputs, *capture(once))


def replay(recording: Recording, leaves: Sequence) -> dict[int, Tensor]:
    """Run the recorded call for these leaves, and return the outputs in memory of their own."""
    if recording.inputs:
        torch._foreach_copy_(list(recording.inputs.values()), [memory_of(leaves[i]) for i in recording.inputs])
    recording.replay()
    # the next replay overwrites the outputs of this one
    return {j: x.clone() for j, x in recording.returned.items()}


def memory_of(x: Tensor) -> Tensor:
    """Return the elements from the first to the last, as they lie in memory.

    A copy of them can be viewed with x's strides, expanded ones too.
    """
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((span,), (1,))


def capture_cuda(once: Callable) -> tuple[Callable[[], None], object]:
    """Capture one CUDA graph of a call that has run before, so that nearly all of its kernels are compiled and loaded.

    Some kernels are not: they are compiled again for tensors at multiples of 16 bytes, such as the recording's own.
    The mode "relaxed" allows loading these, and other threads' work meanwhile.
    """
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    side = _capture_stream(torch.cuda.current_device())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a recording has memory of its own
    try:  # not `torch.cuda.graph`: a signal while it is entered would leave the stream recording
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
    """Copy the leaves' tensors on the host (best in pinned memory) to the device, on a separate stream.

    The copy overlaps with the device's work: the current stream waits for it only where the tensors are read.
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
    """Return the device's stream for copies, one for all calls, because each stream keeps memory of its own."""
    return torch.cuda.Stream(device)
