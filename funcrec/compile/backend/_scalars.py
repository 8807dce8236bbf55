"""Compute what a long loop needs of single numbers once, before the loop.

    for i: y[i] = x[i] * pow(β, t)        →        s = pow(β, t);   for i: y[i] = x[i] * s

Inductor writes the expression of a number f[] into each loop that reads it, and the compiler leaves it there: the loop
may write to the memory that the number is read from. A loop of Adam's step computed two powers in f64 for each vector.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.fx import Node

LONG = 4096  # elements of a loop for each of its numbers, for which a buffer of these numbers pays
COSTLY = {
    "pow", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sigmoid",
    "tanh", "erf", "erfc", "lgamma",
}  # fmt: skip


def once(run_node: Callable[..., Any]) -> Callable[..., Any]:
    """Return Inductor's `run_node` with buffers for the few costly numbers that long loops on the CPU read."""

    def run(lowering: Any, node: Node) -> Any:
        value = run_node(lowering, node)
        if node.op == "call_function" and is_few(node) and is_costly(value):
            value.realize()
        return value

    return run


def is_few(node: Node) -> bool:
    """Return whether a reader of the node's value has LONG elements for each of its own, or an open number."""
    x = node.meta.get("val")
    if not isinstance(x, Tensor) or x.device.type != "cpu" or not isinstance(count := x.numel(), int):
        return False
    return any(size >= LONG * count if isinstance(size, int) else count == 1 for size in sizes_read(node))


def sizes_read(node: Node) -> Iterator[Any]:
    """Yield the numbers of elements of what is computed from the node's value, or from views of it."""
    for user in node.users:
        if isinstance(x := user.meta.get("val"), Tensor):
            yield x.numel()
            if getattr(user.target, "is_view", False):
                yield from sizes_read(user)


def is_costly(value: Any) -> bool:
    """Return whether a lowered value is an expression with a costly function, which no buffer holds."""
    from torch._inductor.ir import Pointwise, StorageBox, TensorBox

    if not (isinstance(value, TensorBox) and isinstance(value.data, StorageBox)):
        return False
    expression = value.data.data
    return isinstance(expression, Pointwise) and not COSTLY.isdisjoint(expression.inner_fn_opcount().used_ops)
