"""torch's composed operators by operations of a fixed order, and the table of all that are replaced."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.invariance import (
    _attention,
    _circular,
    _composed,
    _error_function,
    _extrema,
    _functions,
    _slopes,
    _sums,
    _windows,
)
from funcrec.invariance._functions import widened
from funcrec.mesh import REDUCE, reduced_in_order

aten, prims = torch.ops.aten, torch.ops.prims
SHORT = (torch.float16, torch.bfloat16)
FUNCTIONS = {
    _functions: ("exp expm1 log log1p log2 log10 sigmoid tanh sqrt rsqrt sinh cosh asinh acosh atanh"),
    _circular: "sin cos tan asin acos atan atan2",
    _error_function: "erf erfc erfinv",
}
functions: dict[str, Callable[..., Tensor]] = {
    name: widened(getattr(module, name)) for module, names in FUNCTIONS.items() for name in names.split()
}


def dtype_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of an operation of the tensors: those without dims have no say if others are floats."""
    wide = [x.dtype for x in tensors if x.dim() and x.is_floating_point()] or [
        x.dtype for x in tensors if x.is_floating_point()
    ]
    return functools.reduce(torch.promote_types, wide)


def of_one_dtype(args: Sequence[Any]) -> list[Any]:
    """Return arguments whose floats without dims have the dtype of the others, which decide the dtype of a result.

    torch computes with some numbers of more digits, and vmap gives those of a member a dim, and so a say.
    """
    return of_dtypes(args, [x for x in args if isinstance(x, Tensor) and x.is_floating_point()])


def of_dtypes(args: Sequence[Any], chosen: Sequence[Tensor]) -> list[Any]:
    """Return arguments where the chosen tensors without dims have the dtype of the other chosen ones."""
    others = [x.dtype for x in chosen if x.dim()]
    if not others or all(x.dtype == others[0] for x in chosen):
        return list(args)
    dtype, is_number = functools.reduce(torch.promote_types, others), {id(x) for x in chosen if not x.dim()}
    return [x.to(dtype) if id(x) in is_number else x for x in args]


def rounded_once(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return f with 16-bit floats computed in f32, as torch does: its parts are not rounded, nor do they overflow.

    A number of Python's has 24 bits then, in a compiled program, too. A tensor without dims is rounded to 16 bits, as
    vmap does with that of a member.
    """

    def run(x: Any, *args: Any, **kwargs: Any) -> Tensor:
        for a in (x, *args):  # most calls: no list of them is made
            if isinstance(a, Tensor) and a.dtype in SHORT:
                break
        else:
            return f(x, *args, **kwargs)
        if (dtype := dtype_of([a for a in (x, *args) if isinstance(a, Tensor)])) not in SHORT:
            return f(x, *args, **kwargs)
        own, *rest = (a.to(dtype).float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in (x, *args))
        return f(own, *rest, **kwargs).to(kwargs.get("dtype") or dtype)

    return run


def filled(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return f, which gets numbers in place of a tangent that torch keeps as zeros without memory.

    torch makes numbers of such a tangent before most operators, but hands these few what it is.
    """

    def run(*args: Any, **kwargs: Any) -> Tensor:
        return f(*(torch.zeros(a.shape, dtype=a.dtype, device=a.device) if is_empty(a) else a for a in args), **kwargs)

    return run


def is_empty(x: Any) -> bool:
    return isinstance(x, Tensor) and x._is_zerotensor()


def scaled(x: Tensor, y: Any) -> Tensor:
    """Return x y. Zeros without memory stay so: their product with inf is 0, too."""
    return aten._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device) if is_empty(x) else times(x, y)


def scaled_sum(x: Tensor, y: Any, alpha: Any = 1) -> Tensor:
    return x + (y if alpha == 1 else y * alpha)


def scaled_difference(x: Tensor, y: Any, alpha: Any = 1) -> Tensor:
    return x - (y if alpha == 1 else y * alpha)


times, sum_with = rounded_once(lambda x, y: x * y), rounded_once(scaled_sum)


def biased(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return beta · bias + alpha · product(a, b) as a function, by the operations that vmap makes of it.

    So a member has its own bits in 16 bits, too. As in BLAS, a bias with beta 0 is not read.
    """

    def run(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        out = product(a, b)
        out = out if alpha == 1 else times(out, alpha)
        return out if beta == 0 else sum_with(bias if beta == 1 else times(bias, beta), out)

    return run


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta · bias + alpha · a b by the operations that vmap makes of it, which are not those of a stack."""
    out = _sums.mm(a, b)
    if beta == 0:
        return out if alpha == 1 else times(out, alpha)
    return sum_with(bias if beta == 1 else times(bias, beta), out, alpha)


def lerp(x: Tensor, y: Tensor, weight: Any) -> Tensor:
    """Return x + weight (y - x); torch takes y - (y - x) (1 - weight) for weights from ½ on."""
    near, far = x + (y - x) * weight, y - (y - x) * (1 - weight)
    if not isinstance(weight, Tensor):
        return near if abs(weight) < 0.5 else far
    return torch.where(weight.abs() < 0.5, near, far)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Return x with values at indices. Sums are in the order of positions."""
    if not accumulate or not x.is_floating_point():
        return aten.index_put(x, indices, values, accumulate)
    known = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for _, i in known):
        return NotImplemented
    dims = [d for d, _ in known]
    rest = [d for d in range(x.dim()) if d not in dims]
    spread = torch.broadcast_tensors(*(i for _, i in known))
    places, sizes, shape = spread[0].new_zeros(()), [x.shape[d] for d in dims], spread[0].shape
    for i, n in zip(spread, sizes, strict=True):
        places = places * n + torch.where(i < 0, i + n, i)
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0  # where indices lie in the shape of values
    others = [x.shape[d] for d in rest]
    values = values.expand([*others[:first], *shape, *others[first:]]).movedim(
        tuple(range(first, first + len(shape))), tuple(range(len(shape)))
    )
    rows = values.reshape(places.numel(), math.prod(others))
    moved = x.permute(*dims, *rest)
    flat = moved.reshape(math.prod(sizes), rows.shape[1])
    out = flat.scatter_add(0, places.reshape(-1, 1).long().expand(rows.shape), rows).reshape(moved.shape)
    return out.permute([*map([*dims, *rest].index, range(x.dim()))])


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Any:
    """Return x with rows of the source added at their places along `dim`, in their order."""
    if not x.is_floating_point() or not x.dim():
        return NotImplemented if x.is_floating_point() else aten.index_add(x, dim, index, source, alpha=alpha)
    source, dim = source if alpha == 1 else source * alpha, dim % x.dim()
    places = index.reshape(-1, *[1] * (x.dim() - 1 - dim)).long()
    return x.scatter_add(dim, places.expand(source.shape), source)


def power(x: Any, y: Any) -> Tensor:
    """Return x^y. Small whole exponents and roots that are known are products and roots."""
    dtype, like = torch.result_type(x, y), x if isinstance(x, Tensor) else y
    if not dtype.is_floating_point:
        return torch.pow(x, y)
    as_tensor = lambda z: z.to(dtype) if isinstance(z, Tensor) else torch.full((), z, dtype=dtype, device=like.device)
    known = None if isinstance(y, Tensor) else float(y)
    if known is not None and known.is_integer() and abs(known) <= 64:
        return _functions.whole_power(as_tensor(x), int(known))
    if known in (0.5, -0.5):
        return functions["sqrt" if known > 0 else "rsqrt"](as_tensor(x))
    return widened(_functions.power)(as_tensor(x), as_tensor(y))


def norm(x: Tensor, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if order == 2:
        return functions["sqrt"](_sums.sum_of(x * x, dims, keepdim))
    if order in (0, 1):
        return _sums.sum_of((x != 0).to(x.dtype) if order == 0 else x.abs(), dims, keepdim)
    if order in (float("inf"), float("-inf")):
        over = list(dims) if dims else list(range(x.dim()))
        return (torch.amax if order > 0 else torch.amin)(x.abs(), over, keepdim)
    return power(_sums.sum_of(power(x.abs(), order), dims, keepdim), 1 / order)


def bce_with_logits(x: Tensor, y: Tensor, weight: Any = None, pos_weight: Any = None, reduction: int = 1) -> Tensor:
    """Return the cross entropy of logits by the operations that vmap makes of it, so that a member has its own bits."""
    exp, log, most = functions["exp"], functions["log"], (-x).clamp_min(0)
    rest = log(exp(-most) + exp(-x - most))
    own = (1 - y) * x
    loss = own + most + rest if pos_weight is None else own + ((pos_weight - 1) * y + 1) * (rest + most)
    loss = loss if weight is None else loss * weight
    return loss if reduction == 0 else (_sums.mean_all if reduction == 1 else _sums.sum_all)(loss)


def variance(x: Tensor, dims: Any, correction: float | None = 1, *, output_dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of squared distances from the mean, divided by n - correction."""
    dims = list(dims) if dims else list(range(x.dim()))
    count = math.prod(x.shape[d] for d in dims)
    apart = x - _sums.mean_of(x, dims, True)
    total = _sums.sum_of(apart * apart, dims) / max(count - (1 if correction is None else correction), 0)
    return total if output_dtype is None else total.to(output_dtype)


def product(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the product in the order of the elements: the last of the products up to each."""
    if dim is None:
        return product(x.reshape(-1), 0, dtype=dtype)
    if not x.dim() or not x.shape[dim]:
        return torch.prod(x, dim, keepdim, dtype=dtype)  # ones, or the number itself
    last = torch.cumprod(x, dim, dtype=dtype).narrow(dim, x.shape[dim] - 1, 1)
    return last.clone() if keepdim else last.squeeze(dim).clone()


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Return log Σ e^x over the elements up to each: m + log s, with their greatest number m and s = Σ e^(x - m).

    Windows of 1, 2, 4, … elements join their left neighbours. So an element does not see those after it.
    """
    if not x.dim() or not x.is_floating_point():
        return aten.logcumsumexp(x, dim)
    most, total, size, length = x, torch.ones_like(x), 1, x.shape[dim]
    while size < length:
        pad = lambda y, value, size=size: torch.cat(
            [torch.full_like(y.narrow(dim, 0, size), value), y.narrow(dim, 0, length - size)], dim
        )
        left, of_left = pad(most, -math.inf), pad(total, 0.0)
        less = functions["exp"](-torch.where(left == most, 0.0, (left - most).abs()))
        total = torch.where(left > most, of_left + total * less, total + of_left * less)
        most, size = _extrema.maximum(left, most), 2 * size
    return most + functions["log"](total)


def rrelu(x: Tensor, noise: Tensor, least: float = 0.125, most: float = 1 / 3, training: bool = False, *_: Any) -> Any:
    """Return the leaky relu of evaluation, whose slope is the middle one. In training torch draws slopes."""
    return NotImplemented if training else aten.leaky_relu(x, (least + most) / 2)


def prim_sum(x: Tensor, dims: Any, *, output_dtype: torch.dtype | None = None) -> Tensor:
    return _sums.sum_of(x, dims, dtype=output_dtype) if dims else x.to(output_dtype or x.dtype)


REPLACED: dict[Any, Callable] = {
    REDUCE: reduced_in_order,
    **{getattr(aten, n).default: f for n, f in functions.items()},
    **{getattr(prims, n).default: f for n, f in functions.items() if n not in ("sigmoid", "erfinv")},
    prims.erf_inv.default: functions["erfinv"],
    **_extrema.REPLACED,
    **_windows.REPLACED,
    **_composed.REPLACED,
    **{operator: rounded_once(f) for operator, f in _composed.ROUNDED.items()},
    prims.pow.default: power,
    prims.sum.default: prim_sum,
    aten.prod.default: product,
    aten.prod.dim_int: product,
    prims.var.default: variance,
    aten.add.Tensor: sum_with,
    aten.add.Scalar: filled(sum_with),
    aten.sub.Tensor: rounded_once(scaled_difference),
    aten.sub.Scalar: rounded_once(scaled_difference),
    aten.rsub.Tensor: rounded_once(lambda x, y, *, alpha=1: y - (x if alpha == 1 else x * alpha)),
    aten.rsub.Scalar: rounded_once(lambda x, y, alpha=1: y - (x if alpha == 1 else x * alpha)),
    aten.mul.Tensor: times,
    aten.mul.Scalar: scaled,
    aten.div.Tensor: rounded_once(lambda x, y: x / y),
    aten.div.Scalar: rounded_once(lambda x, y: x / y),
    aten.div.Tensor_mode: rounded_once(aten.div.Tensor_mode),
    aten.addcmul.default: rounded_once(lambda x, a, b, *, value=1: x + (a * b if value == 1 else a * value * b)),
    aten.addcdiv.default: rounded_once(lambda x, a, b, *, value=1: x + (a if value == 1 else a * value) / b),
    aten.lerp.Scalar: rounded_once(lerp),
    aten.lerp.Tensor: rounded_once(lerp),
    aten.square.default: lambda x: x * x,
    aten.pow.Tensor_Scalar: rounded_once(power),
    aten.pow.Tensor_Tensor: power,
    aten.pow.Scalar: power,
    aten.exp2.default: lambda x: power(2.0, x),
    aten.mm.default: _sums.mm,
    aten.bmm.default: _sums.bmm,
    aten.addmm.default: addmm,
    aten.baddbmm.default: biased(_sums.bmm),
    aten.mv.default: _sums.mv,
    aten.addmv.default: biased(_sums.mv),
    aten.dot.default: filled(_sums.dot),
    aten.vdot.default: filled(_sums.dot),
    aten.sum.default: _sums.sum_all,
    aten.sum.dim_IntList: _sums.sum_of,
    aten.mean.default: _sums.mean_all,
    aten.mean.dim: _sums.mean_of,
    aten.linalg_vector_norm.default: rounded_once(norm),
    aten.binary_cross_entropy_with_logits.default: rounded_once(bce_with_logits),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention.attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention.attention_backward,
    aten.index_put.default: rounded_once(index_put),
    aten._unsafe_index_put.default: rounded_once(index_put),
    aten.index_add.default: rounded_once(index_add),
    aten.scatter_add.default: rounded_once(aten.scatter_add.default),
    aten.sigmoid_backward.default: rounded_once(lambda d, y: d * (1 - y) * y),
    aten.tanh_backward.default: rounded_once(lambda d, y: d * (1 - y * y)),
    aten.logcumsumexp.default: rounded_once(logcumsumexp),
    **{operator: rounded_once(f) for operator, f in _slopes.REPLACED.items()},
    aten.rrelu_with_noise.default: rrelu,
    aten.silu.default: rounded_once(lambda x: x * functions["sigmoid"](x)),
}
