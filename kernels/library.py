"""Register implementations as torch operators `torch.ops.funcrec_<implementation>.<name>`, opaque to a compiler.

An implementation is a module with some or all functions of `SCHEMAS`. An operator computes the shapes of its outputs
without running. vmap maps an operator over a batch as stacks (`stacks`) or in a loop. Operators have no derivative, and
raise if an input is tracked.
"""

import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from funcrec.kernels import attention, draws, extrema, forms, interaction, invariant, stacks, vocabulary
from funcrec.kernels.rules import RULES
from funcrec.kernels.tracked import is_differentiating, is_tracked_here
from torch import Tensor

MODULES = {name: f"funcrec.kernels.{name}" for name in ("reference", "cpp", "triton", "fbgemm")}

TERMS = "Tensor[] d, Tensor[] rows, Tensor[] offsets, Tensor[] weights, int[] segments"
_RULE = (
    "Tensor lr, Tensor step, Tensor? key, str rule, float[] hyper, Tensor? first=None, int[] dims=[], "
    "Tensor? numbers=None"
)
SCHEMAS = {
    "pooled_lookup": "(Tensor[] tables, Tensor[] rows, Tensor offsets, Tensor? weights, SymInt[] features, SymInt "
    "num_bags, int blocks=1) -> Tensor",
    "pooled_lookup_weights": "(Tensor d_out, Tensor[] tables, Tensor[] rows, Tensor offsets, Tensor "
    "weights, int[] features) -> Tensor",
    "gather_rows": "(Tensor table, Tensor rows) -> Tensor",
    "scatter_rows": "(Tensor table, Tensor rows, Tensor count, Tensor new) -> Tensor",
    "scatter_rows_": "(Tensor(a!) table, Tensor rows, Tensor count, Tensor new) -> ()",
    "expand": f"({TERMS}, int[] shapes) -> Tensor[]",
    "coalesce": f"({TERMS}, int[] shapes) -> Tensor[]",
    "fused_update": f"(Tensor[] tables, Tensor[] slots, {TERMS}, {_RULE}) -> Tensor[]",
    "fused_update_": f"(Tensor(a!)[] tables, Tensor(b!)[] slots, {TERMS}, {_RULE}) -> ()",
    "take_ranges": "(Tensor values, Tensor starts, Tensor lengths, SymInt capacity) -> (Tensor, Tensor)",
    "take_ranges_transpose": "(Tensor d, Tensor starts, Tensor lengths, SymInt num_values) -> Tensor",
    "bucketize": "(Tensor rows, Tensor offsets, Tensor? weights, int num_shards, int block) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    "owner_blocks": "(Tensor ids, Tensor offsets, int[] lanes, int[] slots, int num_bags, int num_ranks, SymInt room, "
    "bool wide, bool placed) -> (Tensor, Tensor, Tensor)",
    "to_padded": "(Tensor values, Tensor offsets, SymInt max_length, float fill, int? whole=None) -> Tensor",
    "from_padded": "(Tensor padded, Tensor offsets, SymInt capacity) -> Tensor",
    "quantized_lookup": "(Tensor[] tables, Tensor[] rows, Tensor offsets, Tensor? weights, SymInt[] features, SymInt "
    "num_bags, int[] bits, int[] dims) -> Tensor",
    "quantized_rows": "(Tensor table, Tensor rows, int bits, int dim) -> Tensor",
    "quantize_rows": "(Tensor table, int bits, Tensor? key=None) -> Tensor",
    "top_k": "(Tensor queries, Tensor items, Tensor? rows, Tensor? offsets, int k, int bits=0) -> (Tensor, Tensor)",
    **attention.SCHEMAS,
    **draws.SCHEMAS,
    **extrema.SCHEMAS,
    **interaction.SCHEMAS,
    **invariant.SCHEMAS,
    **vocabulary.SCHEMAS,
}
SUMS = ("coalesce", "expand")
STACKED = {  # {operator that takes stacks: the names of its arguments}
    "pooled_lookup": ("tables", "rows", "offsets", "weights", "features", "num_bags", "blocks"),
    **dict.fromkeys(SUMS, ("d", "rows", "offsets", "weights", "segments", "shapes")),
    "fused_update": (
        "tables", "slots", "d", "rows", "offsets", "weights", "segments", "lr", "step", "key", "rule", "hyper", "first",
        "dims", "numbers",
    ),
}  # fmt: skip
# {pure operator: how many arguments from the first its twin for copies writes to}
WRITTEN = {"scatter_rows": 1, "fused_update": 2, "draw_rows": 1, "settle_ids": 1, "settle_columns": 1}
IN_PLACE = {name: f"{name}_" for name in WRITTEN}


# -- shapes ------------------------------------------------------------------------------------------------------


def _pooled_lookup(tables, rows, offsets, weights, features, num_bags, blocks=1):
    features = forms.features_of(features)
    dtype = forms.widest([tables[f.table] for f in features])
    return offsets.new_empty((blocks * num_bags, forms.width_of(features, tables) // blocks), dtype=dtype)


def _expand(d, rows, offsets, weights, segments, shapes):
    sizes = forms.capacities(forms.segments_of(segments), rows, len(shapes) // 2)
    return [x for k, dim in zip(sizes, shapes[1::2], strict=True) for x in _entries(k, dim, d, rows)]


def _coalesce(d, rows, offsets, weights, segments, shapes):
    out = []
    sizes = forms.capacities(forms.segments_of(segments), rows, len(shapes) // 2)
    for k, num_rows, dim in zip(sizes, shapes[::2], shapes[1::2], strict=True):
        distinct, grads = _entries(min(k, num_rows), dim, d, rows)
        out += [distinct, grads, distinct.new_empty(()), torch.empty_like(distinct)]
    return out


def _entries(capacity, dim, d, rows):
    like = (*d, *rows, torch.empty(0))[0]
    dtype = forms.accumulation_dtype(d[0].dtype) if d else torch.float32
    return like.new_empty(capacity, dtype=torch.int64), like.new_empty((capacity, dim), dtype=dtype)


def _take_ranges(values, starts, lengths, capacity):
    taken = values.new_empty((capacity, *values.shape[1:]))
    return taken, lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int64)


def _bucketize(rows, offsets, weights, num_shards, block):
    lengths = rows.new_empty(num_shards * (offsets.shape[0] - 1), dtype=torch.int64)
    moved = rows.new_empty(0, dtype=torch.float32) if weights is None else torch.empty_like(weights)
    return torch.empty_like(rows), lengths, moved, torch.empty_like(rows, dtype=torch.int64)


def _owner_blocks(ids, offsets, lanes, slots, num_bags, num_ranks, room, wide, placed):
    columns = room + len(slots) // max(num_ranks, 1) * num_bags
    blocks = ids.new_empty((num_ranks, columns), dtype=torch.int64 if wide else torch.int32)
    return blocks, *(ids.new_empty(n, dtype=torch.int64) for n in (num_ranks, ids.shape[0] if placed else 0))


def _quantized_lookup(tables, rows, offsets, weights, features, num_bags, bits, dims):
    forms.check_tables("quantized_lookup", tables, bits, dims)
    width = max((c + dims[t] for t, c in zip(features[::7], features[6::7], strict=True)), default=0)
    return offsets.new_empty((num_bags, width), dtype=torch.float32)


def _quantized_rows(table, rows, bits, dim):
    forms.check_coded("quantized_rows", table, bits, dim)
    return table.new_empty((rows.shape[0], dim), dtype=torch.float32)


def _top_k(queries, items, rows, offsets, k, bits=0):
    dtype = forms.score_dtype(queries, items, bits)
    return tuple(queries.new_empty((queries.shape[0], k), dtype=d) for d in (dtype, torch.int64))


def blank(x: Tensor) -> Tensor:
    """Return an uninitialised tensor of x's shape, with rows end to end for any strides of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


FAKES: dict[str, Callable] = {
    "pooled_lookup": _pooled_lookup,
    "pooled_lookup_weights": lambda d_out, tables, rows, offsets, weights, features: torch.empty_like(weights),
    "gather_rows": lambda table, rows: table.new_empty(
        (rows.shape[0], table.shape[1]), dtype=forms.accumulation_dtype(table.dtype)
    ),
    "scatter_rows": lambda table, rows, count, new: blank(table),
    "expand": _expand,
    "coalesce": _coalesce,
    "fused_update": lambda tables, slots, *rest: [blank(x) for x in (*tables, *slots)],
    "take_ranges": _take_ranges,
    "take_ranges_transpose": lambda d, starts, lengths, num_values: d.new_empty((num_values, *d.shape[1:])),
    "bucketize": _bucketize,
    "owner_blocks": _owner_blocks,
    "to_padded": lambda values, offsets, max_length, fill, whole=None: values.new_empty(
        (offsets.shape[0] - 1, max_length, *values.shape[1:])
    ),
    "from_padded": lambda padded, offsets, capacity: padded.new_empty((capacity, *padded.shape[2:])),
    "quantized_lookup": _quantized_lookup,
    "quantized_rows": _quantized_rows,
    "quantize_rows": lambda table, bits, key=None: table.new_empty(
        (table.shape[0], forms.row_bytes(bits, table.shape[1])), dtype=torch.uint8
    ),
    **attention.FAKES,
    **draws.FAKES,
    **extrema.FAKES,
    **interaction.FAKES,
    **invariant.FAKES,
    **vocabulary.FAKES,
    "top_k": _top_k,
}


# -- registration ------------------------------------------------------------------------------------------------


@functools.cache
def load(implementation: str) -> object:
    """Return the module of an implementation. The first call defines its operators; the reference has none."""
    with _loading:  # Without the lock, two threads at once would both define the operators.
        return _loaded(implementation)


_loading = threading.Lock()


@functools.cache
def _loaded(implementation: str) -> object:
    module = importlib.import_module(MODULES[implementation])
    if implementation != "reference":
        _define(f"funcrec_{implementation}", module)
    return module


def operator(implementation: str, name: str) -> Callable | None:
    """Return the reference's function, or the implementation's operator, or None if there is no such function."""
    module = load(implementation)
    if implementation == "reference":
        found = cast(Any, getattr(module, name, None))
        return filled(found) if name == "to_padded" else found
    if not hasattr(module, IN_PLACE.get(name, name)):
        return None
    return getattr(getattr(torch.ops, f"funcrec_{implementation}"), name).default


def function(implementation: str, name: str) -> Callable:
    """Return the function that the operator runs. Its arguments must be plain tensors (`is_bare`).

    A direct call saves the dispatcher's time, which is longer than a small call.
    """
    load(implementation)
    return _functions[f"funcrec_{implementation}::{name}"]


@functools.cache
def planned(name: str) -> Callable:
    """Return the "cpp" function for the usual arguments of an operation. For unusual arguments it returns None."""
    return getattr(load("cpp"), f"planned_{name}")


def check_name(call: str, implementation: str) -> str:
    """Return the name of an implementation. Raise if there is no implementation of this name."""
    if not isinstance(implementation, str) or implementation not in MODULES:
        raise (ValueError if isinstance(implementation, str) else TypeError)(
            f"funcrec.kernels.{call}: the implementation is unknown.\n  got   {implementation!r}\n  need  one of"
            f" {list(MODULES)}\n  try   implementation='reference', or None for the device's own"
        )
    return implementation


def twin(target: object) -> tuple[Callable, int] | None:
    """Return (in-place form, number of arguments that it writes to) of a pure operator, or None for other targets."""
    if not isinstance(target, torch._ops.OpOverload) or not target.namespace.startswith("funcrec_"):
        return None
    return _twins.get(target._schema.name)


def filled(to_padded: Callable) -> Callable:
    """Return `to_padded` with the fill as a float, and also as an int if the fill is whole.

    torch's stable ABI has no argument that may be an int or a float.
    """

    def run(values, offsets, max_length, fill, whole=None):
        return to_padded(values, offsets, max_length, fill if whole is None else whole)

    return run


_libraries: dict[str, torch.library.Library] = {}  # These references keep the operators alive.
_functions: dict[str, Callable] = {}
_twins: dict[str, tuple[Callable, int]] = {}


def _define(namespace: str, module: object) -> None:
    compiled = getattr(module, "compiled_operators", frozenset)()
    for name, schema in SCHEMAS.items():
        written = IN_PLACE.get(name, name)
        if not hasattr(module, written):
            continue
        run, in_place, fake = getattr(module, written), None, FAKES.get(name, lambda *args: None)
        if written == "fused_update_":
            takes_members = getattr(module, "TAKES_MEMBERS", False)
            run = stacks.update_of_members(run, lambda rule, *rest: RULES[rule].is_timed, takes_members)
        elif name in SUMS:
            run, fake = stacks.sums_of_members(run), stacks.sums_of_members(fake)
        elif name == "pooled_lookup":
            run = stacks.lookup_of_members(run, getattr(module, "READS_STACKS", False))
            fake = stacks.lookup_of_members(fake)
        elif name == "to_padded":
            run = filled(run)
        if usual := getattr(module, "USUAL", {}).get(written):
            run = _usual_first(usual, run)
        if name in IN_PLACE:
            run, in_place = _pure(run, name), run
        own, on_cpu = STACKED.get(name, ()), name not in compiled
        define(namespace, name, schema, run, fake, in_place=in_place, stacked=own, on_cpu=on_cpu)


def _usual_first(usual: Callable, run: Callable) -> Callable:
    """Return an operation that calls `usual`, which returns (result,), or None for arguments that are for `run`."""
    return lambda *args: run(*args) if (out := usual(*args)) is None else out[0]


def define(
    namespace: str,
    name: str,
    schema: str,
    run: Callable,
    fake: Callable,
    *,
    in_place: Callable | None = None,
    stacked: Sequence[str] = (),
    layout: torch.Tag = torch.Tag.needs_fixed_stride_order,
    on_cpu: bool = True,
) -> None:
    """Define an operator `torch.ops.<namespace>.<name>`.

    in_place: a function of the same arguments that writes to the first one or two arguments, which are tensors or lists
    of tensors. stacked: the names of the arguments, if the operator takes stacks. layout: a tag that says what compiled
    programs must keep of the arguments' strides. on_cpu: whether `run` is the operator on the CPU.
    """
    library = _libraries.get(namespace) or _libraries.setdefault(namespace, torch.library.Library(namespace, "DEF"))
    library.define(name + schema, tags=(layout, torch.Tag.pt2_compliant_tag))
    if on_cpu:
        library.impl(name, run, "CPU")
    _functions[f"{namespace}::{name}"] = run
    library.impl(name, run, "CUDA")
    library.impl(name, fake, "Meta")
    library.impl(name, _without_derivative(namespace, name), "Autograd", with_keyset=True)
    if in_place is not None:
        _twins[f"{namespace}::{name}"] = in_place, WRITTEN.get(name, 2)
    if not name.endswith("_"):
        op = getattr(getattr(torch.ops, namespace), name).default
        loop = functools.partial(_loop, op)
        rule = stacks.map_of(op, stacked, loop) if stacked else loop
        torch.library.register_vmap(f"{namespace}::{name}", rule, lib=library)


def _without_derivative(namespace: str, name: str) -> Callable:
    """Return the kernel that autograd and each level of torch.func call.

    It calls the operator, or raises if the caller wants the derivative of an argument.
    """
    packet = getattr(getattr(torch.ops, namespace), name)

    def run(keyset, *args, **kwargs):
        if is_differentiating():
            for x in args:  # a list has tensors alone or numbers alone, and those of many ranks are many
                own = x if isinstance(x, (list, tuple)) else (x,)
                if own and isinstance(own[0], torch.Tensor) and any(map(is_tracked_here, own)):
                    refuse_derivatives(name, namespace.removeprefix("funcrec_"))
        return packet.default.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return run


def refuse_derivatives(name: str, implementation: str) -> NoReturn:
    """Raise an error that names what has derivatives: the reference if it has the operation, else funcrec.optim."""
    known = hasattr(load("reference"), name)
    hint = (
        "implementation='reference', or None, which takes it for such tensors"
        if known
        else "an update of `funcrec.optim`"
    )
    raise TypeError(
        f"funcrec.kernels.{name}: implementation {implementation!r} has no derivative here.\n  got   a tensor that grad"
        f" or jvp follows\n  need  plain tensors\n  try   {hint}"
    )


def _pure(in_place: Callable, name: str) -> Callable:
    """Return the pure operation, which runs `in_place` on copies of the tensors to which that function writes.

    The copies are contiguous, because a compiled program keeps only the order of an operand's strides. The program may
    interleave the members of a stack in a table that all members share.
    """
    copy = lambda x: x.clone(memory_format=torch.contiguous_format)
    count = WRITTEN[name]

    def run(*args):
        copies = [copy(x) if isinstance(x, Tensor) else [copy(y) for y in x] for x in args[:count]]
        in_place(*copies, *args[count:])
        return copies[0] if isinstance(copies[0], Tensor) else [y for x in copies for y in x]

    return run


def _loop(op: Callable, info, in_dims, *args):
    """Return the stacked results of a call of the operator for each batch member, and the batch dimension of each."""
    dims = [None if _is_shared(d) else d for d in in_dims]  # a single None for a list of numbers, which may be long
    size = info.batch_size
    blank = lambda x, d: _member(x, d, None)
    call = lambda pick: op(*(pick(x, d) for x, d in zip(args, dims, strict=True)))
    members = [call(lambda x, d: _member(x, d, i)) for i in range(size)] or [call(blank)]  # noqa: B023
    stack = lambda parts: torch.stack(list(parts))[:size]  # An empty batch has no rows, each of one member's shape.
    if isinstance(members[0], Tensor):
        return stack(members), 0
    stacked = [stack(parts) for parts in zip(*members, strict=True)]
    return (stacked, [0] * len(stacked)) if isinstance(members[0], list) else (tuple(stacked), (0,) * len(stacked))


def _is_shared(dim) -> bool:
    return all(map(_is_shared, dim)) if isinstance(dim, (list, tuple)) else dim is None


def _member(x: Any, dim: Any, index: int | None) -> Any:
    """Return member `index` of a batch, or with index None a member of zeros for an empty batch."""
    if isinstance(x, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_member(y, d, index) for y, d in zip(x, dim, strict=True)]
    if dim is None:
        return x
    tensor, at = cast(Tensor, x), cast(int, dim)
    if index is None:
        return tensor.new_zeros([*tensor.shape[:at], *tensor.shape[at + 1 :]])
    return tensor.select(at, index).contiguous()
