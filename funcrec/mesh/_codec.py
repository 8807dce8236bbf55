"""Codecs: vectors travel between ranks in fewer bytes than they have in memory.

    y = decode(exchange(encode(x)))      d_x = decode'(exchangeᵀ(encode'(d_y)))      tangents: by the rule of y

Derivatives treat a coded exchange as the linear map that it is without rounding: the derivative of coding is the
identity. Coding is an operator, so that compiled, emulated and real ranks round alike. Under emulation nothing travels:
`send` rounds values before the exchange, and cotangents before the transposed exchange.
Shapes: n ranks; W columns of a vector, which is cut into K rows of `widths`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from funcrec.core import check, field_problems, one_level_below, written
from funcrec.kernels import library
from funcrec.mesh._axes import Axis, bind, bound_axes
from funcrec.mesh._collectives import all_gather, all_to_all

Code = Literal["float16", "bfloat16", "int8"]
STEPS = 127  # the steps of int8 on each side of zero
SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Codec:
    """The codes of the vectors that ranks send in a sharded lookup.

    `forward` codes the vectors that the owners of a table's rows send back. `backward` codes the cotangents that
    owners receive.

    None sends every bit. "bfloat16" and "float16" round each element with a relative error of at most 2^-8 and 2^-11.
    In float16 a finite value above 65504 becomes 65504, and a value below 2^-14 is rounded to a multiple of 2^-24.
    "int8" sends each row (one bag's vector of one feature and column block, or one id's row) as whole multiples of
    max|row| / 127, together with max|row| in f32. A row of zeros stays zero; a row with an infinity or a NaN arrives as
    NaN. Vectors of 16 bits travel unchanged, unless the codec is int8. Ids, lengths, weights, dense gradients and the
    exchanges between copies of a table are never coded.

    Law: Codec() changes no bit. `forward` alone changes no gradient for the same cotangents. `backward` alone changes
      no lookup. Emulated meshes and real ranks give the same bits.

    Example: 1.01 travels as bfloat16. It arrives as the nearest number that bfloat16 can hold.
      >>> import torch, funcrec as fr
      >>> mesh, plan = fr.Mesh.emulated(model=2), fr.Plan({"item": fr.row_wise("model")})
      >>> tables = fr.shard_tables({"item": torch.full((3, 2), 1.01)}, plan, mesh, codec=fr.Codec(forward="bfloat16"))
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[0], [1]]})
      >>> f = lambda tables, ids: fr.lookup(tables, ids, [fr.FeatureConfig("clicked", table="item")])["clicked"]
      >>> fr.shard_map(f, mesh=mesh, in_specs=(tables.specs(), fr.P("model")), out_specs=fr.P("model"))(tables, ids)
      tensor([[1.0078, 1.0078],
              [1.0078, 1.0078]])

    Source: TorchRec's QCommsConfig, fbgemm_gpu.quantize_comm, whose int8 sends an offset with the scale: 8 bytes, and
      less error for rows that are far from symmetric; Yang et al., "Training Deep Learning Recommendation Model with
      Quantized Collective Communications", DLP-KDD 2020.
    """

    forward: Code | None = None
    backward: Code | None = None

    def __post_init__(self) -> None:
        check("funcrec.Codec", field_problems(self))

    def transposed(self) -> "Codec":
        """Return the codec with its two directions exchanged."""
        return Codec(self.backward, self.forward)


def send(
    collective: Literal["all_to_all", "all_gather"],
    xs: Sequence[Tensor],
    axes: tuple[str, ...],
    codec: Codec | None,
    widths: Sequence[tuple[int, ...]],
) -> list[Tensor]:
    """Return the collective's result for every x[..., W], whose vectors travel as the codec codes them.

    `codec.forward` codes what the collective sends, and `codec.backward` codes what the transposed collective sends.
    For all_to_all, x is [n, ...]. all_gather returns [n, ...].

    widths: for each x the widths of its rows, which add up to W. Each row has a scale of its own.
    """
    codec = Codec() if codec is None else codec
    bound = bound_axes("funcrec.lookup", axes)
    if codec == Codec():
        return list(_moved(collective, xs, axes))
    if any(a.group is None for a in bound):  # nothing travels in one process, so values are rounded here
        coded = [_rounded(x, codec.forward, None, w) for x, w in zip(xs, widths, strict=True)]
        got = _moved(collective, coded, axes)
        return [_rounded(x, None, codec.backward, w) for x, w in zip(got, widths, strict=True)]
    trip = _Trip(collective, codec, tuple(widths), tuple(a._replace(marker=None) for a in bound))
    return list(_CodedExchange.apply(trip, *(a.marker for a in bound), *xs))


def _moved(collective: str, xs: Sequence[Tensor], axes: tuple[str, ...]) -> tuple[Tensor, ...]:
    return (all_to_all if collective == "all_to_all" else all_gather)(tuple(xs), axes)


def is_coded(kind: str | None, dtype: torch.dtype) -> bool:
    """Return whether the codec makes elements of that dtype narrower."""
    return kind is not None and getattr(torch, kind).itemsize < dtype.itemsize


# -- one vector --------------------------------------------------------------------------------------------------


def encode(x: Tensor, kind: str, widths: Sequence[int]) -> Tensor:
    """Return the bytes as which x[..., W] travels, i8[..., bytes]: the elements, then the scales of the rows."""
    if kind == "bfloat16":
        return x.to(torch.bfloat16, memory_format=torch.contiguous_format).view(torch.int8)
    if kind == "float16":
        most = torch.finfo(torch.float16).max
        near = x.clamp(-most, most)
        # This restores an infinity, because `x - near` is infinite only there. A finite x
        # adds less than 4 / tiny · tiny = 4, and 65504 + 4 is rounded to 65504.
        near.add_(x - near, alpha=torch.finfo(x.dtype).tiny)
        return near.to(torch.float16, memory_format=torch.contiguous_format).view(torch.int8)
    x = x if x.dtype == torch.float64 else x.float()
    out, whole = x.new_empty(encoded_shape(x.shape, kind, widths), dtype=torch.int8), [slice(None)] * (x.dim() - 1)
    scales = []
    for first, last, width in _runs(widths):
        rows = x[..., first:last].unflatten(-1, (-1, width))
        scale = rows.abs().amax(-1).float()  # x ≈ scale · step / 127 for a whole number step in [-127, 127]
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        steps = (
            (rows / scale[..., None]).mul_(STEPS).round_().clamp_(-STEPS, STEPS).nan_to_num_(0.0)
        )  # 0 / 0 gives step 0
        out = written(out, (*whole, slice(first, last)), steps.flatten(-2))
        scales.append(scale)
    return written(out, (*whole, slice(x.shape[-1], None)), torch.cat(scales, -1).view(torch.int8))


def decode(coded: Tensor, kind: str, widths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the vectors that `encode` coded, f[..., W], up to the rounding of `encode`."""
    if kind != "int8":
        return coded.contiguous().view(getattr(torch, kind)).to(dtype)
    wide, size = torch.float64 if dtype == torch.float64 else torch.float32, sum(widths)
    scales = coded[..., size:].clone(memory_format=torch.contiguous_format).view(torch.float32).to(wide)
    out, row = coded.new_empty((*coded.shape[:-1], size), dtype=dtype), 0
    for first, last, width in _runs(widths):
        num_rows = (last - first) // width
        rows = coded[..., first:last].to(wide).div_(STEPS).unflatten(-1, (num_rows, width))
        rows = rows.mul_(scales[..., row : row + num_rows, None]).flatten(-2)
        out = written(out, (*[slice(None)] * (out.dim() - 1), slice(first, last)), rows)
        row += num_rows
    return out


def encoded_shape(shape: Sequence[int], kind: str, widths: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the encoded bytes of vectors f[..., W]."""
    *first, size = shape
    return (*first, size + SCALE_BYTES * len(widths) if kind == "int8" else 2 * size)


def _runs(widths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first column, column after the last, width) for each run of neighbouring rows of one width."""
    first = row = 0
    while row < len(widths):
        count = next((i for i, w in enumerate(widths[row:]) if w != widths[row]), len(widths) - row)
        last = first + count * widths[row]
        yield first, last, widths[row]
        first, row = last, row + count


library.define(
    "funcrec_codec",
    "encode",
    "(Tensor x, str kind, int[] widths) -> Tensor",
    encode,
    lambda x, kind, widths: x.new_empty(encoded_shape(x.shape, kind, widths), dtype=torch.int8),
)
library.define(
    "funcrec_codec",
    "decode",
    "(Tensor coded, str kind, int[] widths, ScalarType dtype) -> Tensor",
    decode,
    lambda coded, kind, widths, dtype: coded.new_empty((*coded.shape[:-1], sum(widths)), dtype=dtype),
)
_encode, _decode = torch.ops.funcrec_codec.encode, torch.ops.funcrec_codec.decode


# -- derivatives -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rounding:
    """The static part of `_Rounded`. It is not a tuple, because torch.func would flatten a tuple in every call."""

    there: str | None
    back: str | None
    widths: tuple[int, ...]


def _rounded(x: Tensor, there: str | None, back: str | None, widths: tuple[int, ...]) -> Tensor:
    """Return x rounded as codec `there` rounds.

    Its cotangent is rounded as codec `back` rounds.
    """
    if not (is_coded(there, x.dtype) or is_coded(back, x.dtype)):
        return x
    return _Rounded.apply(_Rounding(there, back, widths), x)


class _Rounded(torch.autograd.Function):
    """The identity, up to one rounding in the forward pass and another in the backward pass."""

    @staticmethod
    def forward(spec, x):
        if not is_coded(spec.there, x.dtype):
            return x.clone()
        return _decode(_encode(x, spec.there, spec.widths), spec.there, spec.widths, x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.spec = inputs[0]

    @staticmethod
    def backward(ctx, d_y):
        return None, _rounded(d_y, ctx.spec.back, ctx.spec.there, ctx.spec.widths)

    @staticmethod
    def jvp(ctx, _, tangent):
        spec = ctx.spec
        return one_level_below(lambda saved, ts: _rounded(ts[0], spec.there, spec.back, spec.widths), (), (tangent,))

    @staticmethod
    def vmap(info, in_dims, spec, x):
        return _Rounded.apply(spec, x.movedim(in_dims[1], 0)), 0


@dataclasses.dataclass(frozen=True)
class _Trip:
    """The static part of `_CodedExchange`. `axes` are the axes of a real mesh, without their markers."""

    collective: str
    codec: Codec
    widths: tuple[tuple[int, ...], ...]
    axes: tuple[Axis, ...]

    def transposed(self) -> "_Trip":
        """Return the description of the transposed exchange.

        It sends every rank's part back to that rank. Where the collective is a gather, the rank then adds the parts.
        """
        return dataclasses.replace(self, collective="all_to_all", codec=self.codec.transposed())


class _CodedExchange(torch.autograd.Function):
    """Exchange encoded vectors over axes of real ranks. The tensors are the axes' markers, and then the vectors."""

    @staticmethod
    def forward(trip, *tensors):
        k, kind = len(trip.axes), trip.codec.forward
        axes = [a._replace(marker=m) for a, m in zip(trip.axes, tensors[:k], strict=True)]
        pairs = list(zip(tensors[k:], trip.widths, strict=True))
        sent = [_encode(x, kind, w) if is_coded(kind, x.dtype) else x for x, w in pairs]
        with bind(axes):
            got = _moved(trip.collective, sent, tuple(a.name for a in axes))
        return tuple(
            _decode(y, kind, w, x.dtype) if is_coded(kind, x.dtype) else y for y, (x, w) in zip(got, pairs, strict=True)
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.trip = inputs[0]
        markers = inputs[1 : 1 + len(ctx.trip.axes)]
        ctx.save_for_backward(*markers)
        ctx.save_for_forward(*markers)

    @staticmethod
    def backward(ctx, *d_ys):
        d_xs = _CodedExchange.apply(ctx.trip.transposed(), *ctx.saved_tensors, *d_ys)
        if (
            ctx.trip.collective == "all_gather"
        ):  # x[r] went to all ranks s: d_x[r] = Σ_s d_y[s][r], whose terms arrived encoded
            d_xs = [d.sum(0, dtype=d.dtype) for d in d_xs]
        return None, *(None for _ in ctx.trip.axes), *d_xs

    @staticmethod
    def jvp(ctx, _, *tangents):
        trip = ctx.trip
        return one_level_below(
            lambda markers, ts: _tangents(trip, markers, ts), ctx.saved_tensors, tangents[len(trip.axes) :]
        )

    @staticmethod
    def vmap(info, in_dims, trip, *tensors):
        k, at = len(trip.axes), int(trip.collective == "all_to_all")
        xs = [x if d is None else x.movedim(d, at) for x, d in zip(tensors[k:], in_dims[1 + k :], strict=True)]
        ys = _CodedExchange.apply(trip, *tensors[:k], *xs)
        return ys, tuple(None if d is None else 1 for d in in_dims[1 + k :])


def _tangents(trip: _Trip, markers: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    moving = [i for i, t in enumerate(tangents) if t is not None]
    own = dataclasses.replace(trip, widths=tuple(trip.widths[i] for i in moving))
    out: list[Tensor | None] = [None] * len(tangents)
    for i, y in zip(moving, _CodedExchange.apply(own, *markers, *(tangents[i] for i in moving)), strict=True):
        out[i] = y
    return tuple(out)
