"""Programs of exchanges, and their compiled results on this process's ranks."""

import contextlib
from unittest import mock

import torch

import funcrec as fr
from funcrec.compile import _program
from programs.as_staged import staged_only

# What one exchange of a program does with the exchange's operand f[n, SIZE, ...].
KINDS = {
    "swap": lambda x: fr.all_to_all(x, "x").flip(0),
    "gather": lambda x: fr.all_gather(x[0], "x") * 2,
    "sum": lambda x: fr.psum(x, "x") - x,
    "scatter": lambda x: fr.psum_scatter(x, "x").expand_as(x) + 1,
    "blocks": lambda x: torch.stack(fr.all_to_all(x, "x").unbind(0)[::-1]),
    "first": lambda x: x + fr.all_gather(x[0], "x")[0],
    "ends": lambda x: x + (lambda y: y[0] - y[-1])(fr.all_gather(x[0], "x")),
}


def run(steps, x):
    """Return all values of the program [(kind, number of an earlier value, size, dtype)]. Value 0 is x f64[n, 8]."""
    values = [x]
    for kind, source, size, dtype in steps:
        of = values[source % len(values)].to(dtype)
        values.append(KINDS[kind](of.repeat(1, -(-size // of.shape[1]))[:, :size].contiguous()))
    return values[1:]


def compiled(programs):
    """Return, for each program, (its values staged and without the passes, compiled with them, the bytes sent without
    them, with them)."""
    n = torch.distributed.get_world_size()
    mesh, out = fr.Mesh.distributed(x=n), []
    for steps in programs:
        both = []
        for passes in (False, True):
            x = torch.linspace(-1, 1, n * 8, dtype=torch.float64).reshape(n, 8) * (1 + torch.distributed.get_rank())
            f = fr.jit(
                lambda x, steps=steps: fr.shard_map(
                    lambda x: run(steps, x), mesh=mesh, in_specs=fr.P(), out_specs=fr.P("x"), check=False
                )(x)
            )
            smaller = _program.smaller_exchanges if passes else lambda graph: None
            with (
                mock.patch.object(_program, "smaller_exchanges", smaller),
                contextlib.nullcontext() if passes else staged_only(),
            ):
                lowered = f.lower(x)
                both.append((lowered.compile()(x), lowered.exchanges))
        (plain, many), (fast, few) = both
        out.append((plain, fast, many, few))
    return out


def code_of_two_rounds():
    """Return the generated code of two successive exchanges, and of a matrix product that only the program's end
    needs."""
    from programs.generated_code import generated_code

    mesh = fr.Mesh.distributed(x=torch.distributed.get_world_size())

    def two(x, w):
        y = fr.all_gather(x @ x, "x").sum(0)
        return fr.all_gather(y @ y, "x").sum(0) + (w @ w).sin()

    f = fr.jit(fr.shard_map(two, mesh=mesh, in_specs=fr.P(), out_specs=fr.P(), check=False))
    _, (code,) = generated_code(f, torch.eye(200), torch.eye(200))
    return code
