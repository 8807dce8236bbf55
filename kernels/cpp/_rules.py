"""Translate the graph of a user's rule to C++ (_generate.py), compile it, and load it for the fused update's row loop.

The rule is a graph of aten operations on one row: (row f[D], grad f[D], lr, t, repeats, slots...) -> [row, slots...].
"""

import ctypes
import hashlib
import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from funcrec.kernels import files
from funcrec.kernels.cpp import _formulas as formulas
from funcrec.kernels.cpp import _native
from funcrec.kernels.cpp._generate import TYPES, UnsupportedError, Value, Writer, literal
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

FLAGS = (
    "-O3", "-std=c++17", "-shared", "-fPIC", "-g0", "-w", "-fopenmp-simd", "-fwrapv", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
LEVEL_FLAGS = json.loads(Path(__file__).with_name("levels.json").read_text())  # CMakeLists.txt reads this file, too.
NARROW_BYTES, WIDE_BYTES = 32, 64  # the sizes of vectors for which torch has Sleef's functions
LETTERS = {torch.float32: "f", torch.float64: "d"}
MOST_ON_STACK = 1 << 16  # the most bytes of a row's intermediate values on the stack
GIVEN = ("row", "grad", "lr", "t", "repeats")


class Generated(NamedTuple):
    """A compiled rule for one dim and dtype.

    rule, prepare: the addresses of the two functions.
    sizes: the number of elements of each slot in one row.
    shared_bytes: the number of bytes that `prepare` writes once per update.
    constants: the tensors that the rule reads besides its arguments. Each update reads the current values.
    forms: the dtype and shape of each constant.
    """

    rule: int
    prepare: int
    sizes: tuple[int, ...]
    shared_bytes: int
    constants: tuple[Tensor, ...]
    forms: tuple[tuple[torch.dtype, torch.Size], ...]
    dim: int
    dtype: torch.dtype
    library: ctypes.CDLL


def generate(graph: GraphModule) -> Generated:
    """Return a rule, translated, compiled and loaded. Raise UnsupportedError if an operation has no formula."""
    text, constants, symbols = translate(graph)
    library = build(text)
    library.funcrec_link((ctypes.c_void_p * max(len(symbols), 1))(*map(sleef, symbols)))
    library.funcrec_shared_bytes.restype = ctypes.c_int64
    address = lambda f: ctypes.cast(f, ctypes.c_void_p).value or 0
    given = [x.meta["val"] for x in graph.graph.find_nodes(op="placeholder")]
    return Generated(
        address(library.funcrec_rule), address(library.funcrec_prepare), tuple(x.numel() for x in given[len(GIVEN) :]),
        library.funcrec_shared_bytes(), tuple(constants), tuple((x.dtype, x.shape) for x in constants),
        given[0].numel(), given[0].dtype, library,
    )  # fmt: skip


def decompositions() -> dict:
    """Return the decompositions of operations without a formula into operations that have one."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    def var(x, dim=None, *, correction=1, keepdim=False):
        dims = list(range(x.dim())) if dim is None else list(dim)
        n = math.prod(x.shape[d] for d in dims)
        square = (x - x.mean(dims, keepdim=True)).square()
        return square.sum(dims, keepdim=keepdim) / max(n - (1 if correction is None else correction), 0)

    aten = torch.ops.aten
    own = {
        aten.var.correction: var,
        aten.sigmoid.default: lambda x: 1 / (1 + (-x).exp()),
        aten.dot.default: lambda x, y: (x * y).sum(),
        aten.max.default: lambda x: x.amax(),
        aten.min.default: lambda x: x.amin(),
        aten.std.correction: lambda *args, **kwargs: var(*args, **kwargs).sqrt(),
    }
    more = (aten.linalg_vector_norm, aten._softmax, aten._log_softmax, aten.gelu, aten.elu, aten.leaky_relu)
    return {**core_aten_decompositions(), **get_decompositions(more), **own}


# -- nodes -------------------------------------------------------------------------------------------------------


def translate(graph: GraphModule) -> tuple[str, list[Tensor], list[str]]:
    """Return the C++ text, and the tensors and symbols to which the text refers by number."""
    given = graph.graph.find_nodes(op="placeholder")
    dtype = given[0].meta["val"].dtype
    writer, values, constants = Writer(dtype), {}, []
    memories = ("w", "x", *GIVEN[2:], *(f"s{i}" for i in range(len(given) - len(GIVEN))))
    for node, name in zip(given, memories, strict=True):
        x = node.meta["val"]
        is_number = name in GIVEN
        values[node] = (
            Value(dtype, (), name, 0, name != "repeats") if is_number else writer.array(name, dtype, tuple(x.shape))
        )
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constants.append(getattr(graph, node.target))
            values[node] = constant(writer, constants[-1], len(constants) - 1)
        elif node.op == "call_function":
            take = lambda x: values[x] if isinstance(x, Node) else x
            args = cast(tuple, map_aggregate(node.args, take))
            values[node] = operation(writer, node, args, {k: take(x) for k, x in node.kwargs.items()})
    results = next(iter(graph.graph.find_nodes(op="output"))).args[0]
    targets = [(values[n], name) for n, name in zip(given, memories, strict=True) if name not in ("x", *GIVEN)]
    last = writer.write([(values[r], name, old) for r, (old, name) in zip(results, targets, strict=True)])
    return assemble(writer, last, len(given) - len(GIVEN)), constants, [f[0] for f in writer.functions.values()]


def constant(writer: Writer, x: Tensor, number: int) -> Value:
    if x.dtype not in TYPES:
        raise UnsupportedError(f"a closed-over tensor of {x.dtype}")
    pointer = f"static_cast<const {TYPES[x.dtype]}*>(constants[{number}])"
    if x.numel() == 1:
        return writer.number(x.dtype, tuple(x.shape), 0, f"*{pointer}", is_shared=True)
    name = writer.name("c")
    writer.shared.append(f"const {TYPES[x.dtype]}* const {name} = {pointer};")
    writer.fields[name] = f"const {TYPES[x.dtype]}*"
    return writer.array(name, x.dtype, tuple(x.shape))


def operation(writer: Writer, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Value:
    like, target = node.meta.get("val"), node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(like, Tensor):
        raise UnsupportedError(str(target))
    name, first = target._schema.name.split("::")[1], cast(Any, args[0] if args else None)
    if is_view(target):
        return writer.view(first, like, lambda x: target(x, *args[1:], **kwargs))
    if name in formulas.FILLS:
        x = args[1] if name.startswith("full") else int(name.startswith("ones"))
        return literal(x)._replace(shape=tuple(like.shape))
    if name == "cat":
        return writer.concatenate(first, args[1] if len(args) > 1 else 0, like)
    if name == "arange" and like.numel() != 1:
        start, _, step = (*args, 1)[:3] if len(args) > 1 else (0, *args, 1)
        return writer.elements(like.dtype, like.shape, 0, f"{TYPES[like.dtype]}({start} + i * {step})")
    if name == "flip":
        return writer.pointwise(formulas.COPY, [flipped(first, args[1])], like)
    if name in formulas.BY_LANES or name in formulas.REDUCTIONS:
        return writer.reduce(name, first, like)
    if name == "clamp":
        return clamp(writer, like, *args, **kwargs)
    return elementwise(writer, name, target, args, kwargs, node)


def elementwise(writer: Writer, name: str, target, args: Sequence[Any], kwargs: dict[str, Any], node: Node) -> Value:
    like = node.meta["val"]
    operands = [literal(x) if isinstance(x, (bool, int, float)) else x for x in args]
    if not all(isinstance(x, Value) for x in operands) or kwargs.get("rounding_mode"):
        raise UnsupportedError(str(target))
    if kwargs.get("alpha", 1) != 1:
        operands[1] = writer.pointwise("{0} * {1}", [operands[1], literal(kwargs["alpha"])], like)
    if name == "where":
        return writer.pointwise(formulas.WHERE, operands, like, torch.bool, like.dtype, like.dtype)
    if name in formulas.COMPARISONS:
        given = [x.meta["val"] if isinstance(x, Node) else x for x in cast(tuple[Any, ...], node.args)]
        common = torch.result_type(given[0], given[1]) if len(given) == 2 else given[0].dtype
        return writer.pointwise(formulas.COMPARISONS[name], operands, like, *[common] * len(operands))
    if name in formulas.LOGIC:
        return writer.pointwise(formulas.LOGIC[name], operands, like, *[torch.bool] * len(operands))
    if name == "pow" and args[1] in formulas.POWERS and like.is_floating_point():
        return writer.pointwise(formulas.POWERS[args[1]], operands[:1], like)
    if name == "bitwise_not":
        return writer.pointwise("!{0}" if like.dtype == torch.bool else "~{0}", operands, like)
    formula = formulas.BITS.get(name) or formulas.ARITHMETIC.get(name)
    if formula is None or not (like.is_floating_point() or name in formulas.INTEGRAL or name in formulas.BITS):
        raise UnsupportedError(str(target))
    is_wide = any(x.number is None for x in operands)
    if is_wide and name in formulas.SLEEF and like.dtype in LETTERS and (found := of_vectors(name, like.dtype)):
        return writer.mapped(*found, operands, like)
    return writer.pointwise(formula, operands, like)


def is_view(target: torch._ops.OpOverload) -> bool:
    """Return whether the result shares the first argument's memory, and the operation writes to no memory."""
    returned = [x.alias_info for x in target._schema.returns]
    return len(returned) == 1 and returned[0] is not None and not returned[0].is_write


def flipped(x: Value, dims: Sequence[int]) -> Value:
    if x.number is not None:
        return x
    own = {d % len(x.shape) for d in dims}
    strides = tuple(-s if d in own else s for d, s in enumerate(x.strides))
    return x._replace(strides=strides, offset=x.offset + sum((x.shape[d] - 1) * x.strides[d] for d in own))


def clamp(
    writer: Writer, like: Tensor, x: Value, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None
):
    for formula, bound in (
        (formulas.AT_LEAST, min if low is None else low),
        (formulas.AT_MOST, max if high is None else high),
    ):
        if isinstance(bound, Value):
            raise UnsupportedError("clamp with a tensor for a bound")
        if bound is not None:
            x = writer.pointwise(formula, [x, literal(bound)], like)
    return x


# -- text --------------------------------------------------------------------------------------------------------


def assemble(writer: Writer, last: Sequence[str], num_slots: int) -> str:
    """Return the text of the functions `prepare`, for the numbers of an update, and `rule`, for a row."""
    of = TYPES[writer.dtype]
    levels = sorted({*writer.numbers, *(level for level, _ in writer.loops)})
    lines = [f"{of}* const s{i} = slots[{i}];" for i in range(num_slots)]
    lines += [f"{kind} const {name} = shared->{name};" for name, kind in writer.fields.items()]
    size = sum(dtype.itemsize * n for dtype, n in writer.arrays.values())
    storage = "static thread_local " if size > MOST_ON_STACK else ""
    arrays = {name: (TYPES[dtype], -(-n // 16) * 16) for name, (dtype, n) in writer.arrays.items()}  # full vectors
    lines += [f"alignas(64) {storage}{kind} {name}[{n}];" for name, (kind, n) in arrays.items()]
    for level in levels:
        lines += writer.numbers.get(level, [])
        for (at, n), loop in writer.loops.items():
            if at == level:
                pragma = " ".join(["#pragma omp simd", *loop.kinds])
                inner = [f"  {x}" for x in (*loop.body, *loop.stores)]
                lines += [*loop.before, pragma, f"for (int i = 0; i < {n}; i++) {{", *inner, "}"]
    body = "\n".join(f"  {x}" for x in (*lines, *last))
    shared = "\n".join(f"  {x}" for x in writer.shared)
    maps = "\n".join(mapping(p, *function) for p, function in writer.functions.items())
    links = " ".join(f"{p} = reinterpret_cast<decltype({p})>(at[{i}]);" for i, p in enumerate(writer.functions))
    fields = " ".join(f"{kind} {name};" for name, kind in writer.fields.items())
    return f"""{formulas.PRELUDE}
{maps}
extern "C" void funcrec_link(void** at) {{ {links} }}

struct Shared {{ {fields} }};

extern "C" int64_t funcrec_shared_bytes() {{ return sizeof(Shared); }}

extern "C" void funcrec_prepare({of} lr, {of} t, const void* const* constants, Shared* shared) {{
{shared}
  *shared = Shared{{{", ".join(writer.fields)}}};
}}

extern "C" void funcrec_rule({of}* w, const {of}* x, {of}* const* slots, {of} repeats, const Shared* shared) {{
{body}
}}
"""


def mapping(pointer: str, symbol: str, dtype: torch.dtype, lanes: int, count: int) -> str:
    """Return the text of a pointer to a vector function, and of the loop that calls it.

    If the function requires a higher instruction set than the kernels, only this loop is compiled for the higher one.
    """
    of, names = f"V_{symbol}", [f"a{k}" for k in range(count)]
    size = lanes * dtype.itemsize
    target = "" if _native.level() != "base" else '__attribute__((target("avx2,fma"))) '
    given = ", ".join(f"const {TYPES[dtype]}* {name}" for name in names)
    at = lambda name, of: f"*reinterpret_cast<{of}*>({name} + i)"
    call = f"{pointer}({', '.join(at(name, f'const {of}') for name in names)})"
    return f"""typedef {TYPES[dtype]} {of} __attribute__((vector_size({size}), may_alias));
static {of} (*{pointer})({", ".join([of] * count)});
static {target}void map_{symbol}({TYPES[dtype]}* to, {given}, int n) {{
  for (int i = 0; i < n; i += {lanes}) {at("to", of)} = {call};
}}"""


def of_vectors(name: str, dtype: torch.dtype) -> tuple[str, int] | None:
    """Return the symbol of Sleef's function and its lanes, or None for the C library's function.

    The kernels' instruction set does not change a bit of the results. Functions with `finz` in their names give the
    same bits for vectors of every width. If there is no such function, the narrower vectors serve all levels. A
    processor without AVX2 calls the C library, whose bits differ.
    """
    if _native.library().funcrec_level() < _native.LEVELS["v3"]:
        return None
    parts = lambda size: f"{name}{LETTERS[dtype]}{size // dtype.itemsize}{formulas.SLEEF[name]}"
    wide, narrow = f"Sleef_finz_{parts(WIDE_BYTES)}avx512f", f"Sleef_finz_{parts(NARROW_BYTES)}avx2"
    if _native.level() == "v4" and sleef(wide) and sleef(narrow):
        return wide, WIDE_BYTES // dtype.itemsize
    found = next(filter(sleef, (narrow, f"Sleef_{parts(NARROW_BYTES)}avx2")), None)
    return None if found is None else (found, NARROW_BYTES // dtype.itemsize)


def sleef(symbol: str) -> int | None:
    """Return the address of a vector function in torch's library, or None if it has no such function."""
    try:
        return ctypes.cast(getattr(_native.torch_library(), symbol), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


# -- compiler ----------------------------------------------------------------------------------------------------


def build(text: str) -> ctypes.CDLL:
    """Return the text, compiled for the kernels' instruction set and loaded.

    The object stays on disk under a digest of the text and the command.
    """
    compiler = files.compiler()
    if compiler is None:
        raise RuntimeError(
            "funcrec.kernels.cpp: a rule cannot be compiled.\n  got   no C++ compiler\n  need  a "
            "C++ compiler: g++ or clang++\n"
            '  try   install one, or set CXX to its name, or implementation="reference"'
        )
    command = [compiler, *FLAGS, *LEVEL_FLAGS[_native.level()]]

    def make(path: Path) -> None:
        given = [*command, "-x", "c++", "-", "-o", str(path)]
        done = subprocess.run(given, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"funcrec.kernels.cpp: the compiler refused a rule.\n  got   {done.stderr[:1000]}\n  need  a "
                f"C++17 compiler: {' '.join(command)}"
            )

    name = hashlib.sha256("\n".join([*command, text]).encode()).hexdigest()
    return files.load(f"{name}.so", make, lambda path: ctypes.CDLL(str(path)))
