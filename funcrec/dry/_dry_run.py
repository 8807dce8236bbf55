"""dry_run: the program of one rank of a mesh that does not exist, staged on shapes: its exchanges, memory and time.

    dry_run(step of n ranks) = what fr.jit(step).lower(...) of a rank says, without the other n - 1 ranks

Shapes: n ranks on the axis of an exchange.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from funcrec.compile import eval_shape, jit
from funcrec.core import (
    Count,
    Problem,
    Size,
    check,
    describe,
    is_in_transform,
    map_tensors,
    own_errors,
    sure,
    tree_leaves,
    typed,
)
from funcrec.dry._memory import most_live_bytes
from funcrec.mesh import LEAVES, SWAP, Backend, Mesh, axes_problems, coordinates, on_paper, rank_at
from funcrec.planner import Hardware, latency_s, peer_s_per_byte
from funcrec.sharding import Plan, ShardedTables
from funcrec.train import TrainState, TrainStep

CALL = "funcrec.dry_run"


class Exchange(NamedTuple):
    """One collective of a rank's program.

    kind: the operator of torch.distributed. axis: the axis of the mesh. operand_bytes: the bytes that the rank passes
    to it. sent_bytes: those of them that leave the rank. messages: how many other ranks it sends to, or, of a sum, the
    turns of its ring. seconds: the estimate, latency + bytes / the speed of the links.
    """

    kind: str
    axis: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    operand_bytes: int
    sent_bytes: int
    messages: int
    seconds: float


class DryRun(NamedTuple):
    """What one rank of a step sends, holds and takes. `fr.dry_run` returns it, and `table` shows it.

    Args:
      mesh: {axis: number of ranks}, as pairs.
      exchanges: the collectives of the program, in its order: each (kind, axis, shape, dtype, operand_bytes,
        sent_bytes, messages, seconds). `messages` counts the ranks to which it sends, or the turns of a ring.
        `seconds` is the estimate, latency + bytes / the speed of the links.
      memory: {"tables", "optimizer state", "dense", "batch", "activations and buffers": bytes of this rank}. The last
        is the most that lives at one time between the operations of the program, if none of them are fused: an upper
        bound for a compiled step.
      lookup_s, update_s: the planner's estimates for the slowest rank; None for a plan that `fr.plan` did not make.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.DryRun((("data", 2),), (), {"tables": 64}, None, None).sent_bytes
      0
    """

    mesh: tuple[tuple[str, int], ...]
    exchanges: tuple[Any, ...]
    memory: dict[str, int]
    lookup_s: float | None
    update_s: float | None

    @property
    def sent_bytes(self) -> int:
        """Return the number of bytes that leave this rank in a step."""
        return sum(x.sent_bytes for x in self.exchanges)

    @property
    def messages(self) -> int:
        """Return the number of messages that this rank sends in a step."""
        return sum(x.messages for x in self.exchanges)

    @property
    def exchange_s(self) -> float:
        """Return the estimated seconds of all exchanges, one after the other."""
        return sum(x.seconds for x in self.exchanges)

    @property
    def step_s(self) -> float | None:
        """Return the estimated seconds of a step without its dense part; None without estimates of the planner."""
        if self.lookup_s is None or self.update_s is None:
            return None
        return self.lookup_s + self.exchange_s + self.update_s

    def table(self) -> str:
        """Return a text: a line for each exchange, then the memory and the estimates."""
        size = prod(n for _, n in self.mesh)
        lines = [f"one of {size:,} ranks, {' x '.join(f'{a}={n}' for a, n in self.mesh)}", ""]
        rows = [("exchange", "axis", "operand", "MB sent", "messages", "ms")]
        for x in self.exchanges:
            form = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            row = (x.kind, x.axis, form, f"{x.sent_bytes / 1e6:,.3f}", f"{x.messages:,}", f"{x.seconds * 1e3:.4g}")
            rows.append(row)
        sent = f"{self.sent_bytes / 1e6:,.3f}"
        rows.append(("all", "", "", sent, f"{self.messages:,}", f"{self.exchange_s * 1e3:.4g}"))
        widths = [max(len(r[i]) for r in rows) for i in range(6)]
        aligned = lambda r: [
            x.ljust(w) if i < 3 else x.rjust(w) for i, (x, w) in enumerate(zip(r, widths, strict=True))
        ]
        lines += ["  ".join(aligned(r)).rstrip() for r in rows]
        lines += ["", *(f"{n:26s} {b / 1e6:16,.3f} MB" for n, b in self.memory.items())]
        lines += [f"{'all of this rank':26s} {sum(self.memory.values()) / 1e6:16,.3f} MB", ""]
        if self.step_s is None:
            return "\n".join(
                [*lines, f"estimate: exchanges {self.exchange_s * 1e3:.4g} ms; the plan is not of fr.plan"]
            )
        ms = [f"{sure(x) * 1e3:.4g}" for x in (self.step_s, self.lookup_s, self.exchange_s, self.update_s)]
        return "\n".join([*lines, "estimate: {} ms = lookups {} + exchanges {} + updates {}".format(*ms)])

    def __repr__(self) -> str:
        held = f"{sum(self.memory.values()):,} bytes"
        return f"DryRun(sends {self.sent_bytes:,} bytes in {len(self.exchanges)} exchanges, holds {held})"


@typed
def dry_run(
    make: Callable[[Mesh], TrainStep[Any]],
    mesh: Mapping[str, Count],
    params: Any,
    batch: Any,
    *,
    hardware: Hardware | Literal["h100", "h200", "a100", "cpu"] = "h100",
    plan: Plan | None = None,
    backend: Backend | None = None,
    rank: Size = 0,
) -> DryRun:
    """Return what one rank of a training step sends, holds and takes, without starting a rank.

    The program is that of `fr.jit(step, donate=("state",)).lower(state, batch)` on such a rank. It is staged on shapes:
    no kernel runs, and no memory of a table's size is used. All ranks have one program, and differ in where they send.

    Args:
      make: a mesh -> the step of `fr.train_step(..., mesh=mesh)`. The mesh is valid inside of this call alone.
      mesh: {axis: number of ranks}.
      params: whole parameters, as `step.init` takes them. `fr.eval_shape(model.init, key)` makes some of any size.
      batch: the batch of one rank. It may be on the device meta, as params may.
      hardware: the speeds of the links for the estimates, a `Hardware` or the name of one.
      plan: the plan of the step, for its estimates of lookups and updates.
      backend: who carries the bytes: "gloo" for CPUs, "nccl" for GPUs. They gather and scatter by different operators.
        None is "gloo" for the hardware "cpu", else "nccl".
      rank: the rank whose program it is.

    Raises:
      ValueError: if the mesh has no such rank.
      TypeError: if `make` returns no step on the mesh, or the step reads a tensor's value.

    Cost: a few seconds; the memory of the program's graph, which grows with the tables and with the ranks.

    Example:
      >>> import torch, funcrec as fr
      >>> read, item = [fr.FeatureConfig("clicked", table="item")], fr.TableConfig("item", 10**9, 64)
      >>> loss = lambda params, ids: fr.lookup(params.tables, ids, read).values.square().mean()
      >>> plan = fr.Plan({"item": fr.row_wise("data")})
      >>> step = lambda mesh: fr.train_step(loss, sparse=fr.optim.sgd(), mesh=mesh, plan=plan)
      >>> params = fr.Params({"item": torch.empty(10**9, 64, device="meta")}, {})
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], [3]]})
      >>> found = fr.dry_run(step, {"data": 128}, params, ids)
      >>> found.memory["tables"] == 4 * 64 * -(-10**9 // 128), [x.messages for x in found.exchanges]
      (True, [127, 127, 127, 127])
    """
    check(CALL, axes_problems(mesh), place_problems(mesh, rank))
    hardware = Hardware.named(hardware) if isinstance(hardware, str) else hardware
    carried = backend or ("gloo" if hardware.name == "cpu" else "nccl")
    with on_paper(mesh, rank, carried) as ranks:
        where = Mesh(tuple(mesh.items()), cast(Any, ranks))
        with own_errors(CALL, make, where, need="the step of a mesh"):
            step = make(where)
        check(CALL, step_problems(step))
        state = on_cpu(eval_shape(step.init, on_cpu(params)))
        check(CALL, state_problems(state))
        own_batch = on_cpu(batch)
        lowered = jit(step, donate=("state",)).lower(state, own_batch)
        graph = lowered.graph.graph
        nodes = [n for n in graph.nodes if n.target in LEAVES]
        pairs = zip(nodes, lowered.exchanges, strict=True)
        exchanges = tuple(exchange_of(node, sent, mesh, rank, hardware) for node, sent in pairs)
    memory = {
        "tables": bytes_of(state.tables), "optimizer state": bytes_of(state.slots),
        "dense": bytes_of((state.dense, state.dense_opt)), "batch": bytes_of(own_batch),
        "activations and buffers": most_live_bytes(graph),
    }  # fmt: skip
    lines = None if plan is None or plan.report is None else plan.report.ranks
    slowest = lambda name: None if lines is None else max(getattr(x, name) for x in lines)
    return DryRun(tuple(mesh.items()), exchanges, memory, slowest("lookup_s"), slowest("update_s"))


def exchange_of(node: torch.fx.Node, sent: Any, mesh: Mapping[str, int], rank: int, hardware: Hardware) -> Exchange:
    """Return the exchange of a node of the program. sent: its line of `Lowered.exchanges`."""
    args = cast(tuple[Any, ...], node.args)
    axis = args[-1].removeprefix("paper ")
    ranks = ranks_along(axis, mesh, rank)
    others = len(ranks) - 1
    is_sum = "reduce" in sent.kind and "scatter" not in sent.kind  # a ring takes two turns for a sum
    messages = others * (2 if is_sum else 1)
    if node.target is SWAP:
        place = coordinates(rank, list(mesh), mesh)[axis]
        messages = sum(n > 0 for i, n in enumerate(args[2]) if i != place)
    each = sent.sent_bytes / max(others, 1)  # the planner's costs count a byte to every other rank of the group
    seconds = latency_s(hardware, ranks) + each * peer_s_per_byte(hardware, ranks) if others else 0.0
    operand = args[0].meta["val"]
    return Exchange(sent.kind, axis, sent.shape, sent.dtype, operand.nbytes, sent.sent_bytes, messages, seconds)


def ranks_along(axis: str, mesh: Mapping[str, int], rank: int) -> list[int]:
    """Return the ranks that differ from this rank along the axis alone, with this rank."""
    at = coordinates(rank, list(mesh), mesh)
    return [rank_at({**at, axis: i}, list(mesh), mesh) for i in range(mesh[axis])]


def on_cpu(tree: Any) -> Any:
    """Return the tree with tensors without values on the CPU, whose kernels the program then names."""
    with FakeTensorMode():
        form = lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
        return map_tensors(form, tree)


def bytes_of(tree: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(tree) if isinstance(x, Tensor))


# -- validators --------------------------------------------------------------------------------------------------


def place_problems(mesh: Mapping[str, int], rank: int) -> Iterator[Problem]:
    if mesh and rank >= prod(mesh.values()):
        yield Problem("the mesh has no such rank.", f"rank={rank}", f"0 to {prod(mesh.values()) - 1}", "rank=0")
    if is_in_transform():
        yield Problem("dry_run is called inside a transform.", "a tracked call", "a call outside of it", kind=TypeError)


def step_problems(step: Any) -> Iterator[Problem]:
    if not isinstance(step, TrainStep):
        need, hint = "a step of fr.train_step", "lambda mesh: fr.train_step(loss, mesh=mesh, plan=plan)"
        yield Problem("`make` does not return a step.", describe(step), need, hint, TypeError)


def state_problems(state: Any) -> Iterator[Problem]:
    if not isinstance(state, TrainState) or not isinstance(state.tables, ShardedTables):
        got, hint = "tables that are whole", "fr.train_step(loss, mesh=mesh, plan=plan), with the mesh that `make` gets"
        yield Problem("the step does not run on the mesh.", got, "a step of the mesh", hint, TypeError)
