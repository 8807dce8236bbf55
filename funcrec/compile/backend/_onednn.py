"""Compute float32 products with oneDNN, in programs for processors on which torch's MKL is half as fast.

    a b = linear(a, bᵀ)

On AMD's processors MKL does not use AVX-512: it reaches 100 GFLOP/s per core, and oneDNN reaches 220 GFLOP/s.
The choice depends on the processor and the shapes, never on a clock: every process and rank makes the same choice.
Shapes: a is [M, K], b [K, N]; for members or emulated ranks [S, M, K] and [S, K, N].
"""

import functools
import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from funcrec.compile.backend._digest import processor
from funcrec.kernels import library

aten = torch.ops.aten
ADDED = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0}  # number of arguments before a and b
LEAST = 8  # the least M, K and N for oneDNN; narrower matrices are like vectors
WORTH = 3 << 20  # the least M K N for oneDNN: it takes MKL 60 µs, and a call of oneDNN costs 15 µs more
ROUNDS = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")  # variables that change oneDNN's rounding only


def onednn() -> Callable:
    return torch.ops.mkldnn._linear_pointwise.default  # Some builds of torch lack this operator.


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the product a b, computed member by member if there are members.

    If a is not row-major, and (bᵀ aᵀ)ᵀ needs smaller copies, the function computes that.
    """
    if a.dim() == 3:
        out = a.new_empty(*a.shape[:2], b.shape[2])
        for product, x, y in zip(out, a, b, strict=True):
            product.copy_(mm(x, y))
        return out
    (rows, inner), columns = a.shape, b.shape[1]
    if a.stride(1) != 1 and 2 * (inner + rows) * columns < rows * inner:
        return linear(b.t(), a.t()).t().contiguous()
    return linear(a, b)


def linear(a: Tensor, b: Tensor) -> Tensor:
    """Return the product a b, computed by oneDNN.

    oneDNN copies an `a` that is not row-major. b must be row-major or column-major without gaps: with other strides
    oneDNN is a thousand times slower.
    """
    w = b.t()
    return onednn()(a, w if b.is_contiguous() or w.is_contiguous() else w.contiguous(), None, "none", [], "")


# The operator is our own, because Inductor would fuse later operations into oneDNN's operator, which changes bits.
# Inductor also requires constant weights there.
library.define(
    "funcrec_onednn",
    "mm",
    "(Tensor a, Tensor b) -> Tensor",
    mm,
    lambda a, b: a.new_empty(*a.shape[:-1], b.shape[-1]),
    layout=torch.Tag.flexible_layout,
)
MM = torch.ops.funcrec_onednn.mm.default


def faster_products(graph: GraphModule) -> GraphModule:
    """Return the graph with oneDNN's products where these are faster, or the graph itself if no product is."""
    products = set(large_products(graph.graph))
    if not products or not is_faster():
        return graph
    own, copies = Graph(), {}
    for node in graph.graph.nodes:
        if node not in products:
            copies[node] = own.node_copy(node, copies.__getitem__)
            continue
        *added, a, b = map(copies.__getitem__, node.args)
        copies[node] = own.call_function(MM, (a, b))
        for x in added:  # A loop adds x; most often it is the loop that reads the product.
            copies[node] = own.call_function(aten.add.Tensor, (copies[node], x))
    return GraphModule(graph, own)


def large_products(graph: Graph) -> Iterator[Node]:
    """Yield the f32 products on the CPU that are large enough for a call of oneDNN."""
    for target, added in ADDED.items():
        for node in graph.find_nodes(op="call_function", target=target):
            a, b = (n.meta["val"] for n in node.args[added:])
            sizes = (*a.shape[-2:], b.shape[-1])
            fixed = not node.kwargs and all(isinstance(n, int) for n in (*a.shape, *sizes))
            known = fixed and a.dtype == torch.float32 and a.device.type == "cpu"
            if known and min(sizes) >= LEAST and math.prod(sizes) >= WORTH:
                yield node


def is_faster() -> bool:
    """Return whether oneDNN uses instructions that MKL does not use, and rounds as MKL does.

    oneDNN rounds as MKL does if no setting lowers its precision.
    """
    rounds = torch._C._get_fp32_precision_getter("mkldnn", "matmul") in ("tf32", "bf16") or any(map(os.getenv, ROUNDS))
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled() and not rounds and stays_away()


@functools.cache
def stays_away() -> bool:
    """Return whether the processor has AVX-512 and MKL does not use it."""
    return "AuthenticAMD" in processor() and torch.backends.cpu.get_cpu_capability() == "AVX512"
