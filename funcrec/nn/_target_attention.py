"""Attention of one target over the bag of its history.

    u_b = Σ_i a_i h_i over bag b,   a_i = mlp([h_i, t_b, h_i - t_b, h_i ⊙ t_b])

Shapes: B bags, N capacity of the history, D dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from funcrec.core import Count, Sizes, check, kind_of, remade, tree_problems, typed
from funcrec.jagged import JaggedTensor, bag_reduce, bag_softmax
from funcrec.nn._layer import Layer, width_problems
from funcrec.nn._mlp import mlp

BAGS = kind_of(JaggedTensor)


@remade
@typed
def target_attention(
    dim: Count,
    *,
    sizes: Sizes = (80, 40),
    activation: Callable[[Tensor], Tensor] = torch.sigmoid,
    normalize: bool = False,
) -> Layer[Tensor]:
    """Return a layer of a JaggedTensor f[N, dim] and targets f[B, dim] -> f[B, dim], the weighted sum of each bag.

    Args:
      sizes: the hidden layers of the MLP that computes the weights. An output layer of size 1 follows them.
      activation: follows each hidden layer.
      normalize: whether the weights of a bag are the softmax of the MLP's outputs. With False they are the outputs
        themselves, as in the paper, so that their sum measures the strength of the interest.

    Returns:
      Layer with apply(params, history, target). An empty bag has the vector 0.

    Law: the order of a bag's vectors does not matter, and padding is not read.

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.nn.target_attention(2, sizes=(4,))
      >>> history = fr.JaggedTensor.from_lists([[[1.0, 0.0], [0.0, 1.0]], []])
      >>> layer.apply(layer.init(fr.key(0)), history, torch.ones(2, 2)).shape
      torch.Size([2, 2])

    Source: Zhou et al., "Deep interest network for click-through rate prediction" (KDD 2018), eq. 3.
    """
    call = "funcrec.nn.target_attention"
    weigh = mlp((4 * dim, *sizes, 1), activation=activation)

    def apply(params, history: JaggedTensor, target: Tensor) -> Tensor:
        check(call, BAGS.find("history", history))
        found = tree_problems(target, "target", (history.num_bags, dim), "", "a row for each bag")
        check(call, width_problems(history.values, dim, "history.values"), found)
        bag, last = history.bag_ids(), max(history.num_bags - 1, 0)
        if not history.num_bags:
            return target
        h = torch.where((bag < history.num_bags)[:, None], history.values, 0)
        t = target.index_select(0, bag.clamp(max=last))
        weights = weigh.apply(params, torch.cat([h, t, h - t, h * t], 1))
        if normalize:
            weights = bag_softmax(JaggedTensor(weights, history.offsets)).values
        return bag_reduce(JaggedTensor(weights * h, history.offsets), "sum")

    return Layer(weigh.init, apply)
