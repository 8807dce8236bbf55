"""Products of float32 by oneDNN, in programs for processors where torch's MKL has half its speed.

    a b = linear(a, bᵀ)

On AMD's processors MKL stays away from AVX-512: 100 GFLOP/s a core, oneDNN's 220.
The choice follows the processor and the shapes, never a clock: every process and rank makes the same one.
Shapes: a is [M, K], b [K, N]; of members or emulated ranks [S, M, K] and [S, K, N].
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
ADDED = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0}  # arguments before a and b
LEAST = 8  # of M, K and N: narrower ones are vectors
WORTH = 3 << 20  # M K N, 60 µs of MKL's: a call of oneDNN costs 15 µs more
ROUNDS = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")  # with them oneDNN rounds otherwise, MKL does not


def onednn() -> Callable:
    return torch.ops.mkldnn._linear_pointwise.default  # not in every build of torch


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a b, or (bᵀ aᵀ)ᵀ where a does not lie row by row and that has the smaller copies; of each member its own."""
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
    """oneDNN copies an `a` that does not lie row by row, and takes b by rows or columns without gaps: it multiplies any
    other a thousand times as slowly."""
    w = b.t()
    return onednn()(a, w if b.is_contiguous() or w.is_contiguous() else w.contiguous(), None, "none", [], "")


# Our own: what is after oneDNN's, Inductor makes a part of it, in other bits, and needs weights that are constants.
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
    """The graph with oneDNN's products where they are the faster ones; itself where there are none."""
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
        for x in added:  # by a loop: as a rule the one that reads the product
            copies[node] = own.call_function(aten.add.Tensor, (copies[node], x))
    return GraphModule(graph, own)


def large_products(graph: Graph) -> Iterator[Node]:
    """Those of f32 on the CPU that are worth a call of oneDNN's."""
    for target, added in ADDED.items():
        for node in graph.find_nodes(op="call_function", target=target):
            a, b = (n.meta["val"] for n in node.args[added:])
            sizes = (*a.shape[-2:], b.shape[-1])
            fixed = not node.kwargs and all(isinstance(n, int) for n in (*a.shape, *sizes))
            known = fixed and a.dtype == torch.float32 and a.device.type == "cpu"
            if known and min(sizes) >= LEAST and math.prod(sizes) >= WORTH:
                yield node


def is_faster() -> bool:
    """Whether oneDNN has instructions that MKL does not use here, and rounds as MKL does: nobody asked for less."""
    rounds = torch._C._get_fp32_precision_getter("mkldnn", "matmul") in ("tf32", "bf16") or any(map(os.getenv, ROUNDS))
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled() and not rounds and stays_away()


@functools.cache
def stays_away() -> bool:
    """Whether MKL stays away from AVX-512."""
    return "AuthenticAMD" in processor() and torch.backends.cpu.get_cpu_capability() == "AVX512"
