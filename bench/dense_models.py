"""The dense parts of DLRM and DLRM-DCNv2 as plain torch modules, as users of TorchRec write them.

The modules have funcrec's parameters.
Shapes: B batch, F features, D dim.
"""

import torch
from torch import Tensor, nn


def layers(params: list[dict], *, last_relu: bool) -> nn.Sequential:
    """Return linear layers with copies of {"weight", "bias"}, and ReLU between the layers."""
    out: list[nn.Module] = []
    for own in params:
        linear = nn.Linear(own["weight"].shape[1], own["weight"].shape[0], device=own["weight"].device)
        with torch.no_grad():
            linear.weight.copy_(own["weight"])
            linear.bias.copy_(own["bias"])
        out += [linear, nn.ReLU()]
    return nn.Sequential(*(out if last_relu else out[:-1]))


class DLRMDense(nn.Module):
    """The dense part of DLRM: logits = top([x_0, (⟨x_i, x_j⟩)_{i>j}]), x_0 = bottom(dense)."""

    def __init__(self, params: dict, num_features: int):
        super().__init__()
        self.bottom = layers(params["bottom"]["linear"], last_relu=True)
        self.top = layers([*params["mlp"]["linear"], params["out"]], last_relu=False)
        pairs = torch.tril_indices(num_features + 1, num_features + 1, -1, device=params["out"]["weight"].device)
        self.register_buffer("pairs", pairs, persistent=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        first = self.bottom(dense)
        x = torch.cat([first[:, None], pooled.view(len(dense), -1, first.shape[1])], 1)
        products = torch.bmm(x, x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([first, products], 1)).squeeze(1)


class DCNDense(nn.Module):
    """The dense part of DCNv2.

    logits = top(cross([bottom(dense), pooled])), x_{l+1} = x_0 ⊙ (U_l V_l x_l + b_l) + x_l.
    """

    def __init__(self, params: dict, num_features: int):
        super().__init__()
        self.bottom = layers(params["bottom"]["linear"], last_relu=True)
        self.top = layers(params["top"]["linear"], last_relu=False)
        copies = lambda name: nn.ParameterList(nn.Parameter(own[name].clone()) for own in params["cross"])
        self.u, self.v, self.bias = copies("u"), copies("v"), copies("bias")

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        x0 = x = torch.cat([self.bottom(dense), pooled], 1)
        for u, v, bias in zip(self.u, self.v, self.bias, strict=True):
            x = x0 * nn.functional.linear(nn.functional.linear(x, v), u, bias) + x
        return self.top(x).squeeze(1)
