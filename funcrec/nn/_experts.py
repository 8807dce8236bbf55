"""Mixtures of experts for several tasks.

    y_t = Σ_e p_te(x) h_e(x),    p_t(x) = softmax(G_t x),    h_e an MLP

`mmoe`: all tasks mix the same experts. `ple`: each task has its own experts and the shared ones, in several levels.
Shapes: O width of the experts' outputs; t is a task, e an expert.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from funcrec.core import Count, Draw, Sizes, Within, check, random, remade, typed
from funcrec.nn._layer import Layer, param_problems, width_problems, xavier_normal
from funcrec.nn._mlp import mlp

Levels = Annotated[Sequence[Sizes], Within("the layers of a level or more", len, "is empty")]


@remade
@typed
def mmoe(
    num_in: Count,
    num_tasks: Count,
    *,
    num_experts: Count,
    sizes: Sizes,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    weight: Draw = xavier_normal,
) -> Layer[Tensor]:
    """Make a layer x f[..., num_in] -> f[..., num_tasks, O] of experts that all tasks mix, each task by its own gate.

    Args:
      sizes: the layers of each expert, after the input; the activation follows each of them.

    Returns:
      Layer with params {"experts": [an MLP's for each], "gate": a matrix for each task}.

    Law: with one expert, every task has that expert's output.

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.nn.mmoe(4, num_tasks=2, num_experts=3, sizes=(8, 5))
      >>> layer.apply(layer.init(fr.key(0)), torch.ones(6, 4)).shape
      torch.Size([6, 2, 5])

    Source: Ma et al., "Modeling task relationships in multi-task learning with multi-gate mixture-of-experts" (KDD
    2018), eq. 6.
    """
    expert = mlp((num_in, *sizes), activation=activation, final_activation=activation, weight=weight)

    def init(key: Tensor) -> dict[str, Any]:
        for_gate, *keys = random.split(key, num_experts + 1)
        gates = [weight(k, (num_experts, num_in)) for k in random.split(for_gate, num_tasks)]
        return {"experts": [expert.init(k) for k in keys], "gate": torch.stack(gates)}

    def apply(params: dict[str, Any], x: Tensor) -> Tensor:
        call = "funcrec.nn.mmoe"
        form = {"experts": [...] * num_experts, "gate": (num_tasks, num_experts, num_in)}
        check(call, width_problems(x, num_in), param_problems(params, form))
        found = torch.stack([expert.apply(own, x) for own in params["experts"]], -2)
        share = torch.einsum("tei,...i->...te", params["gate"], x).softmax(-1)
        return share @ found

    return Layer(init, apply)


@remade
@typed
def ple(
    num_in: Count,
    num_tasks: Count,
    *,
    shared_experts: Count,
    task_experts: Count,
    sizes: Levels,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    weight: Draw = xavier_normal,
) -> Layer[Tensor]:
    """Make a layer x f[..., num_in] -> f[..., num_tasks, O] of levels of experts, some of one task, some shared by all.

    At each level a task's gate mixes its own experts with the shared ones, and another gate mixes all experts into the
    shared input of the next level.

    Args:
      sizes: for each level, the layers of its experts, after their input; the activation follows each of them.

    Returns:
      Layer with params [{"tasks": [[an MLP's for each expert] for each task], "shared": [an MLP's for each],
      "gates": [a matrix for each task], "gate": the matrix of the shared input}, ...]. The last level has no "gate".

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.nn.ple(4, num_tasks=2, shared_experts=1, task_experts=2, sizes=((8,), (8, 5)))
      >>> layer.apply(layer.init(fr.key(0)), torch.ones(6, 4)).shape
      torch.Size([6, 2, 5])

    Source: Tang et al., "Progressive layered extraction" (RecSys 2020), §4.1 and §4.2.
    """
    widths = [num_in, *(own[-1] for own in sizes)]
    levels = [
        mlp((before, *own), activation=activation, final_activation=activation, weight=weight)
        for before, own in zip(widths, sizes, strict=False)
    ]
    of_task, of_all = task_experts + shared_experts, num_tasks * task_experts + shared_experts
    experts = {"tasks": [[...] * task_experts] * num_tasks, "shared": [...] * shared_experts}
    forms: list[dict] = [{**experts, "gates": [(of_task, n)] * num_tasks, "gate": (of_all, n)} for n in widths[:-1]]
    del forms[-1]["gate"]

    def init_level(key: Tensor, level: int) -> dict[str, Any]:
        for_tasks, for_shared, for_gates, for_gate = random.split(key, 4)
        experts = lambda k, count: [levels[level].init(own) for own in random.split(k, count)]
        params = {
            "tasks": [experts(k, task_experts) for k in random.split(for_tasks, num_tasks)],
            "shared": experts(for_shared, shared_experts),
            "gates": [weight(k, (of_task, widths[level])) for k in random.split(for_gates, num_tasks)],
        }
        is_last = level == len(levels) - 1
        return params if is_last else {**params, "gate": weight(for_gate, (of_all, widths[level]))}

    def init(key: Tensor) -> list[dict[str, Any]]:
        return [init_level(k, i) for i, k in enumerate(random.split(key, len(levels)))]

    def apply(params: list[dict[str, Any]], x: Tensor) -> Tensor:
        check("funcrec.nn.ple", width_problems(x, num_in), param_problems(params, forms))
        own, shared = [x] * num_tasks, x
        for expert, p in zip(levels, params, strict=True):
            by_task = [[expert.apply(e, y) for e in experts] for experts, y in zip(p["tasks"], own, strict=True)]
            common = [expert.apply(e, shared) for e in p["shared"]]
            own = [mixed(g, y, [*es, *common]) for g, y, es in zip(p["gates"], own, by_task, strict=True)]
            if "gate" in p:
                shared = mixed(p["gate"], shared, [*(y for found in by_task for y in found), *common])
        return torch.stack(own, -2)

    return Layer(init, apply)


def mixed(gate: Tensor, x: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """Return Σ_e softmax(gate x)_e experts[e], f[..., O]."""
    share = F.linear(x, gate).softmax(-1)
    return (share.unsqueeze(-2) @ torch.stack(list(experts), -2)).squeeze(-2)
