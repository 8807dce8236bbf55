"""Lowered: the uncompiled program of a call, which users can read, measure and compile.

jit(f).lower(x).compile()(x) = jit(f)(x)
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from funcrec.compile._compiled import Compiled
from funcrec.compile._keys import show_key
from funcrec.compile._writes import leaves_read
from funcrec.core import fail
from funcrec.mesh import LEAVES, group_of

A = ParamSpec("A")
R = TypeVar("R")


class Sent(NamedTuple):
    """One collective: its operator's name, the shape and dtype of its operand, and the bytes that leave the rank."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent_bytes: int


def collectives_of(graph: torch.fx.Graph) -> Iterator[Sent]:
    """Yield the collectives of a staged graph, in its order."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in LEAVES:
            operand, *how, group = node.args
            x: Tensor = operand.meta["val"]
            name = node.target.name().partition("::")[2]
            yield Sent(name, tuple(x.shape), x.dtype, LEAVES[node.target](x.nbytes, group_of(group), *how))


class Lowered(NamedTuple, Generic[A, R]):
    """The program that a call of a jitted function runs. `fr.jit(f).lower(*args)` returns it.

    It shows what the call computes, reads, writes and sends. Lowering runs `f` once on shapes. It compiles nothing. It
    neither takes nor keeps an argument. `fr.jit(f)` does not change.

    Args:
      graph: flat tensors -> flat tensors, operation by operation. It writes to nothing; in-place writes follow it.
      reads: {path: form} of the tensors that a call reads. First come the graph's inputs, in order: tensors of the
        arguments, then captured tensors. Then come the tensors that only the writes read: rows and values to put, and
        the tables and slots of an optimizer that updates in place.
      donated: paths of the tensors that a call uses up.
      written: paths of the donated tensors that keep their memory and get new rows.
      exchanges: the collectives that send from this rank, in the graph's order, each (kind, shape, dtype, sent_bytes);
        empty for emulated ranks.
      compile: () -> the program as code, a function of the same arguments. A second call returns the same code.

    Raises:
      TypeError: from `lower` and from the program, if the call would run `f` itself: under a transform, for tensors
        that require grad while autograd would track them, or for tensors on the device meta. The program also raises
        it for another form of arguments. The program and `compile` raise it in other surroundings than at lowering.
        `lower` also raises the errors that the call would raise before it runs.

    Law: `fr.jit(f).lower(*args).compile()(*args)` returns the values of `fr.jit(f)(*args)`, and takes the same donated
      arguments.

    Example:
      >>> import torch, funcrec as fr
      >>> def count(state, ids):
      ...     return {"seen": state["seen"].index_put((ids,), state["seen"][ids] + 1)}
      >>> state, ids = {"seen": torch.zeros(4)}, torch.tensor([2])
      >>> lowered = fr.jit(count, donate=("state",)).lower(state, ids)
      >>> lowered.reads
      {"state['seen']": 'f32[4]', 'ids': 'i64[1]'}
      >>> lowered.written, lowered.sent_bytes
      (("state['seen']",), 0)
      >>> lowered.compile()(state, ids)
      {'seen': tensor([0., 0., 1., 0.])}
    """

    graph: torch.fx.GraphModule
    reads: dict[str, str]
    donated: tuple[str, ...]
    written: tuple[str, ...]
    exchanges: tuple[Sent, ...]
    compile: Callable[[], Callable[A, R]]

    @property
    def sent_bytes(self) -> int:
        """Return the number of bytes that leave this rank in a call."""
        return sum(x.sent_bytes for x in self.exchanges)

    def __reduce__(self) -> tuple[Any, ...]:
        need, hint = "fr.jit(fn), which pickles, and is lowered where it is loaded", "lowered.as_text(), for its text"
        fail("funcrec.Lowered", "a program does not pickle.", got=repr(self), need=need, hint=hint, kind=TypeError)

    def as_text(self) -> str:
        """Return a text with what the program reads, writes and sends, then the graph with the forms of its values."""
        return f"# {self!r}\n{self.graph.print_readable(print_output=False)}"

    def __repr__(self) -> str:
        reads = ", ".join(f"{path} {form}" for path, form in self.reads.items())
        uses = f"uses up {', '.join(self.donated) or 'nothing'}; writes {', '.join(self.written) or 'nothing'} in place"
        sends = f"sends {self.sent_bytes:,} bytes in {len(self.exchanges)} exchanges"
        return f"Lowered(reads {reads}; {uses}; {sends})"


def lowered(
    entry: Compiled, paths: dict[int, tuple[str, str]], forms: tuple, compile: Callable[[], Callable[A, R]]
) -> Lowered[A, R]:
    """Return the Lowered of a staged program.

    paths: {leaf of the arguments: (argument, path)}. forms: the keys of those leaves.
    """
    staged, first = entry.staged, len(paths)
    path_of = lambda i: paths[i][1] if i < first else f"captured_{i - first}"
    forms = (*forms, *entry.forms)
    inputs = [*staged.inputs, *sorted(leaves_read(staged.plan) - set(staged.inputs))]
    reads = {path_of(i): show_key(forms[i]) for i in inputs}
    written = tuple(path_of(i) for i in sorted(staged.plan.written))
    exchanges = tuple(collectives_of(staged.graph.graph))
    return Lowered(staged.graph, reads, tuple(entry.donated.values()), written, exchanges, compile)
