"""A learned weight for each position in a bag.

    weights[offsets[b] + p] = w_p

Shapes: N ids, L positions.
"""

import torch
from torch import Tensor

from funcrec.core import Count, check, describe, fail, kind_of, remade, typed
from funcrec.jagged import JaggedTensor
from funcrec.nn._layer import Layer, ones

BAGS = kind_of(JaggedTensor)


@remade
@typed
def position_weights(max_length: Count) -> Layer:
    """Return a layer of weights by position: apply(params f[max_length], bags) -> f[N], for a weighted feature.

    The weight is 0 in the padding, and at positions >= max_length.

    Returns:
      Layer whose params are ones at first. `bags` is a JaggedTensor.

    Example:
      >>> import torch, funcrec as fr
      >>> bags = fr.JaggedTensor.from_lists([[7, 8], [], [9]])
      >>> fr.nn.position_weights(3).apply(torch.tensor([1.0, 0.5, 0.2]), bags)
      tensor([1.0000, 0.5000, 1.0000])

    Source: TorchRec's PositionWeightedModule.
    """
    call = "funcrec.nn.position_weights"

    def init(key: Tensor) -> Tensor:
        return ones(key, (max_length,))

    def apply(params: Tensor, bags: JaggedTensor) -> Tensor:
        check(call, BAGS.find("bags", bags))
        if not isinstance(params, Tensor) or not params.is_floating_point() or params.shape != (max_length,):
            got, kind = describe(params), ValueError if isinstance(params, Tensor) else TypeError
            what, hint = "`params` are not this layer's.", "layer.init(key)"
            fail(call, what, got=got, need=f"f[{max_length}]", hint=hint, kind=kind)
        bag = bags.bag_ids()
        start = bags.offsets.index_select(0, bag)
        place = torch.arange(bags.capacity, device=start.device) - start
        inside = (bag < bags.num_bags) & (place < max_length)
        return torch.where(inside, params.index_select(0, torch.where(inside, place, 0)), 0)

    return Layer(init, apply)
