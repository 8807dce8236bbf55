"""A gated recurrent unit over bags of vectors.

r = σ(W_r x + U_r h + c_r)   z = σ(W_z x + U_z h + c_z)   n = tanh(W_n x + b_n + r (U_n h + c_n))   h' = (1 - z) n + z h

Shapes: B bags, N positions, I inputs, H hidden.
"""

import math

import torch
from torch import Tensor

from funcrec.core import Count, check, random, remade, replace, typed
from funcrec.jagged import JaggedTensor
from funcrec.nn._gru_steps import Gru
from funcrec.nn._layer import Layer, param_problems
from funcrec.nn._sasrec import vector_problems, without_padding


@remade
@typed
def gru(num_in: Count, num_hidden: Count) -> Layer[JaggedTensor]:
    """Return a gated recurrent unit: bags of vectors f[N, num_in] -> bags of states f[N, num_hidden].

    Each bag begins with the state 0. Step t computes only the bags that are longer than t.

    Returns:
      Layer with params {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}, in torch.nn.GRU's layout, drawn as there:
      uniformly from ±1/√H. Padding is not read; the states there are 0.

    Raises:
      TypeError: a second derivative, or one in forward mode, inside `jit`, where lengths cannot be read.

    Law: the state at a position does not depend on later vectors, nor on other bags.

    Cost: one product over all positions, and for each step one product over the bags that are longer than it. Forward
      and higher derivatives keep the states of all steps.

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.nn.gru(2, 3)
      >>> bags = fr.JaggedTensor.from_lists([torch.ones(2, 2), torch.ones(1, 2)])
      >>> layer.apply(layer.init(fr.key(0)), bags).values.shape
      torch.Size([3, 3])

    Source: Cho et al., "Learning phrase representations" (EMNLP 2014); torch.nn.GRU, whose state dict it reads.
    """
    shapes = {"weight_ih": (3 * num_hidden, num_in), "weight_hh": (3 * num_hidden, num_hidden)}
    shapes |= {"bias_ih": (3 * num_hidden,), "bias_hh": (3 * num_hidden,)}

    def init(key: Tensor) -> dict[str, Tensor]:
        keys = random.split(key, len(shapes))
        draw = lambda k, shape: (2 * random.uniform(k, shape) - 1) / math.sqrt(num_hidden)
        return {name: draw(k, shape) for (name, shape), k in zip(shapes.items(), keys, strict=True)}

    def apply(params: dict[str, Tensor], bags: JaggedTensor) -> JaggedTensor:
        check("funcrec.nn.gru", vector_problems(bags, num_in), param_problems(params, shapes))
        x = without_padding(bags.values, bags.bag_ids(), bags)
        gates = torch.nn.functional.linear(x, params["weight_ih"], params["bias_ih"])
        return replace(bags, values=Gru.apply(gates, params["weight_hh"], params["bias_hh"], bags.offsets))

    return Layer(init, apply)
