"""Record a compiled call once, with fixed addresses of its tensors, and then replay the whole call.

    copy the batch into the recording's inputs;   replay: [compiled graph → writes → new dense leaves over the old];
    copy the rest out

On CUDA the recording is one CUDA graph of the whole step, without launches, Python or synchronisation in between. The
state keeps its memory: a replay writes rows in place, and copies new values of other leaves over the old values.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

copy_each = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]  # torch exports no other name for it


class Recording(NamedTuple):
    """A recorded call.

    inputs: {leaf: the memory that replaces the memory of the leaf, in order}. replay: a function that runs the call.
    returned: {output: the tensor in which the call leaves it}.
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
    """Return a recording of run(leaves), which writes to donated leaves and returns the results.

    Args:
      moved: (leaf, output) of each donated leaf whose new value is a returned output. The recorded call copies the
        output into the leaf.
      whole: {output: result}.
      capture: (fn) -> (replay, fn's value), such as `capture_cuda`.
    """
    own = set(donated)
    # Addresses are fixed. So `replay` copies values that change from call to call into the recording's memory, and
    # donated leaves stay where they are.
    inputs = {i: memory_of(x).clone() for i, x in enumerate(leaves) if isinstance(x, Tensor) and i not in own}
    fixed = [inputs[i].as_strided(x.shape, x.stride()) if i in inputs else x for i, x in enumerate(leaves)]
    succeeded = {j for _, j in moved}

    def once() -> dict[int, Tensor]:
        results = run(fixed)
        if moved:  # This comes after all reads, because the new value of a leaf may depend on that leaf.
            copy_each([fixed[i] for i, _ in moved], [results[whole[j]] for _, j in moved])
        return {j: results[k] for j, k in whole.items() if j not in succeeded}

    return Recording(inputs, *capture(once))


def replay(recording: Recording, leaves: Sequence) -> dict[int, Tensor]:
    """Return the outputs of the recorded call for these leaves, in memory of their own."""
    if recording.inputs:
        copy_each(list(recording.inputs.values()), [memory_of(leaves[i]) for i in recording.inputs])
    recording.replay()
    # The next replay overwrites the outputs of this replay.
    return {j: x.clone() for j, x in recording.returned.items()}


def memory_of(x: Tensor) -> Tensor:
    """Return a view of the memory from the first element of x to the last, as one dimension.

    A copy of the result can be viewed with x's strides, also if x is expanded.
    """
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((span,), (1,))


def capture_cuda(once: Callable) -> tuple[Callable[[], None], object]:
    """Return (replay, the call's value) of one CUDA graph of the call `once`.

    The call has run before, so nearly all of its kernels are compiled and loaded. Some kernels must be compiled again
    for tensors at multiples of 16 bytes, such as the recording's own. The mode "relaxed" allows loading these kernels,
    and work of other threads meanwhile.
    """
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    side = _capture_stream(torch.cuda.current_device())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # A recording has memory of its own.
    try:  # A signal at the entry of `torch.cuda.graph` would leave the stream recording, so the code does not use it.
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
    """Return the leaves, with tensors on the host (best in pinned memory) copied to the device on a separate stream.

    The copy overlaps with work that the device began before. The current stream waits for the copy.
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


def bring_to_cuda(leaves: list) -> list:
    """Return the leaves, with host leaves copied to the CUDA device if all other leaves are on one CUDA device."""
    devices = {x.device for x in leaves if isinstance(x, Tensor)}
    on_cuda = [d for d in devices if d.type == "cuda"]
    return bring(leaves, on_cuda[0]) if len(devices) > 1 and len(on_cuda) == 1 else leaves


@functools.cache
def _capture_stream(device: int) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)


@functools.cache
def _side_stream(device: torch.device) -> "torch.cuda.Stream":
    """Return the device's stream for copies. All calls share it, because each stream keeps memory of its own."""
    return torch.cuda.Stream(device)
