"""Programs with an open number of rows use products of oneDNN for many rows and products of BLAS for few rows."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from funcrec.compile import two_products
from funcrec.compile.backend import _products


class Layers(torch.nn.Module):
    """Products of each kind: large, with computed weights, small, f64, without bias, and of a three-dimensional
    input."""

    def forward(self, x, w, b):
        cast = F.linear(x, w.half().float(), b)
        small, double = F.linear(x, w[:8], b[:8]), F.linear(x.double(), w.double(), b.double())
        return F.linear(x, w, b), cast, small, double, F.linear(x, w), F.linear(x[:, None], w, b)


def exported(rows):
    given = torch.randn(5, 160), torch.randn(128, 160) / 12, torch.randn(128)
    return torch.export.export(Layers(), given, dynamic_shapes=({0: rows}, None, None), strict=False)


def branches(program):
    return len(program.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond))


class Rows(TorchDispatchMode):
    """Record the numbers of rows that oneDNN gets."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.seen.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_large_products_branch_on_their_rows():
    """A large f32 product with a bias has both branches. All products equal x Wᵀ + b for any number of rows. oneDNN
    makes a plan for each number of rows. It therefore gets multiples of 32 rows."""
    program = exported(torch.export.Dim("B", min=1, max=4096)).run_decompositions({})
    with two_products(program, is_native=False):
        assert branches(program) == 2
        for rows, whole in ((1, 32), (31, 32), (32, 32), (33, 64), (70, 96)):
            x, w, b = torch.randn(rows, 160), torch.randn(128, 160) / 12, torch.randn(128)
            with Rows() as given:
                (many,) = program.graph_module.many_rows(x, w, b)
            assert given.seen == [whole]
            torch.testing.assert_close(many, F.linear(x, w, b), rtol=1e-5, atol=1e-5)
            for got, want in zip(program.module()(x, w, b), Layers()(x, w, b), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_fixed_number_of_rows_has_no_branch():
    """With a fixed number of rows the program has no branch."""
    program = exported(None).run_decompositions({})
    with two_products(program, is_native=False):
        assert branches(program) == 0


def test_a_program_for_intel_alone_has_no_branch(monkeypatch):
    """On Intel's processors BLAS is faster for any number of rows."""
    program = exported(torch.export.Dim("B", min=1, max=4096)).run_decompositions({})
    for vendor, count in (("GenuineIntel", 0), ("AuthenticAMD", 2)):
        monkeypatch.setattr(_products, "processor", lambda vendor=vendor: vendor)
        with two_products(program, is_native=True):
            assert branches(program) == count
