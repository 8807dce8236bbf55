"""The surroundings that a program can see besides its arguments.

Surroundings are part of a compilation's key, or a reason to run the function itself.

jit(f)(x) in surroundings s  =  f(x) in s
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from funcrec.core import is_checking, is_transforming
from funcrec.kernels import ops
from funcrec.mesh import ambient, bound


def _default_device() -> torch.device | None:
    """Return the device of the innermost `with torch.device(...)` or of `torch.set_default_device`, or None."""
    if not torch._C._len_torch_function_stack():
        return None
    return next((m.device for m in reversed(_get_current_function_mode_stack()) if type(m) is DeviceContext), None)


def _axes() -> tuple:
    return tuple((a.name, a.size, a.group, a.index) for a in bound.get().values()) if bound.get() else ()


def _cuda_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


# A program may depend only on these values, its arguments, and tensors that it closes over; staging refuses anything
# else. Every call reads these values; each read takes about 50 ns.
SEEN: dict[str, Callable[[], Any]] = {
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "the default dtype": torch.get_default_dtype,
    "the default device": _default_device,
    "the current CUDA device": _cuda_device,
    "autocast on the CPU": partial(torch.is_autocast_enabled, "cpu"),
    "autocast's dtype on the CPU": partial(torch.get_autocast_dtype, "cpu"),
    "autocast on CUDA": partial(torch.is_autocast_enabled, "cuda"),
    "autocast's dtype on CUDA": partial(torch.get_autocast_dtype, "cuda"),
    "the mesh of `with mesh:`": lambda: ambient.get()[-1:],
    "the axes of shard_map": _axes,
    "the kernels' implementation": ops.ambient,
    "the number of threads": torch.get_num_threads,
    "deterministic algorithms": torch._C._get_deterministic_algorithms,
    "deterministic algorithms (warnings only)": torch._C._get_deterministic_algorithms_warn_only,
    "deterministic fill": torch._C._get_deterministic_fill_uninitialized_memory,
    "float32 products on the CPU": partial(torch._C._get_fp32_precision_getter, "mkldnn", "matmul"),
    "float32 products on CUDA": partial(torch._C._get_fp32_precision_getter, "cuda", "matmul"),
    "reduced sums of bf16 products": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    "reduced sums of f16 products": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "oneDNN": torch._C._get_mkldnn_enabled,
    "cuDNN": torch._C._get_cudnn_enabled,
    "flash attention": torch._C._get_flash_sdp_enabled,
    "memory-efficient attention": torch._C._get_mem_efficient_sdp_enabled,
    "attention by products": torch._C._get_math_sdp_enabled,
    "cuDNN's attention": torch._C._get_cudnn_sdp_enabled,
}
_READ = tuple(SEEN.values())


def lowered_products() -> dict[str, str]:
    """Return {device: the 16 or 19 bits to which products round their f32 operands}, for devices whose products do."""
    each = {device: SEEN[f"float32 products on {name}"]() for device, name in (("cpu", "the CPU"), ("cuda", "CUDA"))}
    return {device: how for device, how in each.items() if how in ("bf16", "tf32")}


def surroundings() -> tuple[Any, ...]:
    """Return the current value of each entry of `SEEN`."""
    return tuple([read() for read in _READ])


def differences(before: tuple, now: tuple) -> dict[str, tuple[Any, Any]]:
    """Return {name: (before, now)} for each entry of `SEEN` that differs."""
    return {name: (a, b) for name, a, b in zip(SEEN, before, now, strict=True) if a != b}


def is_transformed() -> bool:
    """Return whether something follows the program's operations.

    A follower is a transform of torch.func, a forward derivative, `checked`, or a mode of torch.
    """
    return (
        is_transforming()
        or is_checking()
        or torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and _is_followed())
    )


def _is_followed() -> bool:
    return any(type(m) is not DeviceContext for m in _get_current_function_mode_stack())
