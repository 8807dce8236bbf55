"""Compute products with weights by BLAS for few rows, by oneDNN for many rows, in programs for any number of rows.

    x Wᵀ + b = oneDNN(x, W, b) if rows(x) >= MANY else BLAS(x, W, b)          one branch on a size in compiled code

A call of oneDNN costs 10 µs more than a call of BLAS. On processors on which MKL does not use AVX-512, a product by
oneDNN takes half the time. On Intel's it takes 1.1 to 1.5 times as long, so a program for these alone has no branch.
Shapes: B rows, I inputs, O outputs.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from funcrec.compile._writes import arguments
from funcrec.compile.backend._digest import processor
from funcrec.compile.backend._inductor import PATCHING
from funcrec.compile.backend._onednn import onednn

LINEAR = torch.ops.aten.linear.default
MANY = 32  # the least number of rows for oneDNN; `in_steps` pads rows to a multiple of it
LEAST = 1 << 14  # the least number of elements of W for oneDNN


@contextlib.contextmanager
def two_products(exported: torch.export.ExportedProgram, *, is_native: bool) -> Iterator[None]:
    """Return a context for a program whose larger products have the branch, unless BLAS is faster for all rows.

    AOTInductor must compile the program inside the context.

    Args:
      is_native: whether only processors like this one run the program.
    """
    graph = exported.graph_module
    products = [n for n in graph.graph.find_nodes(op="call_function", target=LINEAR) if is_worth_it(n)]
    if not products or not torch.backends.mkldnn.is_available() or (is_native and is_intel()):
        yield
        return
    graph.add_submodule("many_rows", torch.fx.symbolic_trace(in_steps))
    graph.add_submodule("few_rows", torch.fx.symbolic_trace(lambda x, weight, bias: (LINEAR(x, weight, bias),)))
    for node in products:
        replace(node)
    graph.recompile()
    with lowered():
        yield


def is_intel() -> bool:
    return "GenuineIntel" in processor()


def is_worth_it(product: torch.fx.Node) -> bool:
    """Return whether a product is f32[B, O] of f32[B, I] with bias on the CPU, with B open and W large enough."""
    values = [n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in product.args]
    tensors = [x for x in values if isinstance(x, Tensor) and x.dtype == torch.float32]
    if len(values) != 3 or len(tensors) != 3:
        return False
    x, w, b = tensors
    plain = x.dim() == w.dim() == 2 and b.dim() == 1 and all(v.device.type == "cpu" for v in tensors)
    fixed = plain and all(isinstance(n, int) for n in (*w.shape, *b.shape))
    return fixed and w.numel() >= LEAST and isinstance(x.shape[0], torch.SymInt)


def in_steps(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """Return x Wᵀ + b, with x padded by zeros to a multiple of MANY rows.

    oneDNN takes a millisecond to plan for each number of rows, and keeps a thousand plans.
    """
    rows = torch.ops.aten.sym_size.int(x, 0)
    whole = torch.ops.aten.constant_pad_nd.default(x, [0, 0, 0, -rows % MANY])
    return (torch.ops.aten.slice.Tensor(onednn()(whole, weight, bias, "none", [], ""), 0, 0, rows),)


def replace(product: torch.fx.Node) -> None:
    graph, rows = product.graph, arguments(product)[0].meta["val"].shape[0]

    def add(target: Callable[..., Any], args: tuple[Any, ...], value: object) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    with graph.inserting_before(product):
        size = add(torch.ops.aten.sym_size.int, (product.args[0], 0), rows)
        many = add(operator.ge, (size, MANY), rows >= MANY)
        both = graph.get_attr("many_rows"), graph.get_attr("few_rows")
        value = product.meta["val"]
        out = add(torch.ops.higher_order.cond, (many, *both, product.args), (value,))
        product.replace_all_uses_with(add(operator.getitem, (out, 0), value))
    graph.erase_node(product)


@contextlib.contextmanager
def lowered() -> Iterator[None]:
    """Return a context in which Inductor calls oneDNN with weights that are inputs.

    Inductor's own lowering takes only constant weights, and packs them.
    """
    from torch._inductor import ir, mkldnn_ir
    from torch._inductor.lowering import lowerings

    def lower(x, w, b, *how):
        return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(x, w, b, *how))

    wide = onednn()
    with PATCHING:
        before = lowerings[wide]
        lowerings[wide] = lower
        try:
            yield
        finally:
            lowerings[wide] = before
