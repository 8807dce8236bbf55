"""debug_print: a jitted function prints the lines of the function, in their order; transforms print values, once."""

import contextlib
import io

import pytest
import torch
from programs.as_staged import staged_only
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.compile import cut
from funcrec.testing import assert_trees_close

CLICKED = [fr.FeatureConfig("clicked", table="item")]
IDS = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], [3], []]})
PARAMS = fr.Params({"item": torch.arange(10.0)[:, None]}, torch.tensor(2.0))


def lines_of(fn, *args):
    """Return (the printed lines, the result)."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        out = fn(*args)
    return said.getvalue().splitlines(), out


def loss_fn(params, ids):
    acts = fr.lookup(params.tables, ids, CLICKED).values
    fr.debug_print("sum {:.1f}, dense {dense}", acts.sum(), dense=params.dense)
    return fr.losses.weighted_mean((acts * params.dense).sum(1), torch.ones(len(acts)))


def everything(x):
    """Prints between operations, in loops and branches that values decide, in maps and derivatives."""
    fr.debug_print("begins")
    y = torch.func.vmap(lambda row, k: (fr.debug_print("row {} of {}", row, k), row.sum())[1], (0, None))(x, x[0, 0])
    d = torch.func.grad(lambda v: (fr.debug_print("grad at {}", v), v.square().sum())[1])(y)

    def add(total, v):
        fr.debug_print("adds {:.2f} to {:.2f}", v, total)
        return total + v, {}

    total, _ = fr.scan(add, torch.tensor(0.0), d)
    total, _ = fr.scan(add, total, d, unroll=False)
    fr.debug_print("between {}", torch.tensor(3))

    def halve(v):
        fr.debug_print("halves {:.2f}", v)
        return fr.cond(v > 4, lambda v: (fr.debug_print("a quarter of {:.2f}", v), v / 4)[1], lambda v: v / 2, v)

    total = fr.while_loop(lambda v: (fr.debug_print("is {:.2f} > 1", v), v > 1)[1], halve, total)
    fr.debug_print("ends {}", {"as": 1})
    return total


def test_a_program_prints_the_lines_of_the_function():
    """jit(f) prints the lines of f, in the order of f, in each call, and returns f's values."""
    rows, program = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.5, 0.25]]), fr.jit(everything)
    for x in (rows, rows + 1):
        want, out = lines_of(everything, x)
        with staged_only():
            got, same = lines_of(program, x)
        assert got == want and len(want) > 15
        assert_trees_close(same, out)
    assert program.num_compiled() == 1


def test_a_print_writes_nothing_and_reads_before_writes():
    """A compiled, donated step prints old rows before their writes, in order, also what nothing else needs."""

    def step(state, x):
        fr.debug_print("begins")
        fr.debug_print("before {}", state[0])
        new = state.index_add(0, torch.tensor([0]), x[None])
        fr.debug_print("after {}", new[0])
        torch.func.vmap(lambda x: (fr.debug_print("x {}", 2 * x), x)[1])(x)
        fr.debug_print("begins")
        return new

    fast = fr.jit(step, donate=("state",))
    state = torch.zeros(4, 2)
    for i in range(2):
        said, state = lines_of(fast, state, torch.ones(2))
        before, after = (f"tensor([{n}., {n}.])" for n in (i, i + 1))
        assert said == ["begins", f"before {before}", f"after {after}", "x 2.0", "x 2.0", "begins"]
    assert state[0].tolist() == [2.0, 2.0] and not state[1:].any()


def test_members_print_in_order():
    """Under vmap of vmap a call prints a line for each member, the outer member first, with the member's values."""
    x, y = torch.arange(6).view(3, 2), torch.arange(4).view(2, 2)

    def f(a, b):
        fr.debug_print("{} {}", a, b)
        fr.debug_print("{}", 7)
        return a + b

    mapped = torch.func.vmap(lambda a, b: torch.func.vmap(f, (0, None))(a, b), (1, 0))
    want = [f"{int(a)} {y[i]}" for i in range(2) for a in x[:, i]]
    for run in (mapped, fr.jit(mapped)):
        with staged_only():
            assert lines_of(run, x, y)[0] == [*want, "7"]


def test_derivatives_print_values_once():
    """Gradients, tangents and second derivatives print values, each call of the function once, also of a function that
    `remat` computes again. A gradient of rows, which calls the loss twice, prints once; gradients of examples and of
    parts of a batch print a line for each."""
    plain, x = lambda x: (fr.debug_print("x {}", x), x**3)[1], torch.tensor(2.0)
    for f in (plain, fr.remat(plain)):
        own = x.clone().requires_grad_()
        grad, tangent = torch.func.grad(f), lambda x: torch.func.jvp(f, (x,), (x,))  # noqa: B023
        for run in (grad, torch.func.grad(grad), tangent):
            for made in (run, fr.jit(run)):
                with staged_only():
                    assert lines_of(made, x)[0] == ["x 2.0"]
        assert lines_of(lambda: f(own).backward())[0] == ["x 2.0"]  # noqa: B023
    grads = fr.value_and_grad(loss_fn)
    of = lambda p, i: torch.func.grad((rows := fr.of_rows(loss_fn, p, i)).fn)(rows.params)
    for run in (grads, fr.jit(grads), of, fr.jit(of), fr.checked(grads)):
        with staged_only():
            assert lines_of(run, PARAMS, IDS)[0] == ["sum 6.0, dense 2.0"]
    each = lines_of(fr.per_example_grads(loss_fn), PARAMS, IDS)[0]
    assert each == ["sum 3.0, dense 2.0", "sum 3.0, dense 2.0", "sum 0.0, dense 2.0"]
    parts = lines_of(fr.accumulate_grads(loss_fn, 3), PARAMS, IDS)[0]
    assert parts == each


def test_a_branch_prints_once_under_a_derivative():
    """In a program, the derivative of a branch and of a loop prints what the function prints."""
    f = lambda x: fr.cond(x > 0, lambda x: (fr.debug_print("up {}", x), x**2)[1], lambda x: -x, x)
    loop = lambda x: fr.while_loop(lambda x: x < 4, lambda x: (fr.debug_print("at {}", x), 2 * x)[1], x)
    x = torch.tensor(1.5)
    with staged_only():
        assert lines_of(fr.jit(torch.func.grad(f)), x) == (["up 1.5"], 2 * x)
        assert lines_of(fr.jit(lambda x: torch.func.jvp(loop, (x,), (x,))), x)[0] == ["at 1.5", "at 3.0"]
        members = lines_of(fr.jit(torch.func.vmap(loop)), torch.tensor([1.5, 3.0]))[0]
        assert members == lines_of(torch.func.vmap(loop), torch.tensor([1.5, 3.0]))[0]


def test_emulated_ranks_print_in_order():
    """Each emulated rank prints its own part, and what all ranks share is printed once."""
    mesh = fr.Mesh.emulated(x=3)

    def f(x):
        fr.debug_print("part {}", x)
        fr.debug_print("sum {}", fr.psum(x, "x"))
        return x

    run = fr.shard_map(f, mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P("x"))
    assert lines_of(run, torch.arange(3))[0] == [*(f"part tensor([{i}])" for i in range(3)), "sum tensor([3])"]


def test_forms_print_nothing_and_others_refuse():
    """eval_shape prints nothing. Other tracers, exports and pipelines, whose programs do not print, raise."""
    f = lambda x: (fr.debug_print("{}", x), 2 * x)[1]
    assert lines_of(fr.eval_shape, f, torch.ones(2))[0] == []
    with pytest.raises(TypeError, match="another tracer"):
        make_fx(f, tracing_mode="fake")(torch.ones(2))
    module = torch.nn.Module()
    module.forward = f
    with pytest.raises(Exception, match="exported program"):
        torch.export.export(module, (torch.ones(2),), strict=False)
    branch = lambda x: fr.cond(x.sum() > 0, f, torch.neg, x)
    with pytest.raises(TypeError, match="another tracer"):
        make_fx(branch, tracing_mode="fake")(torch.ones(2))
    with pytest.raises(TypeError, match="a step that is cut in two does not print"):
        cut("funcrec.pipeline", lambda state, batch: (f(state), {}), torch.ones(2), torch.ones(2), {})


def test_formats():
    """Fields by place, by name, by attribute, with conversions, and braces are those of str.format."""
    x, batch = torch.tensor([1.0, 2.0]), fr.Batch(IDS, torch.tensor([3.0]))
    for text, args, named in [
        ("{} {}", (x, 1.5), {}), ("{1} {0}", (x, "a"), {}), ("{x[1]:.2f}", (), {"x": x}), ("{.shape} {!r}", (x, x), {}),
        ("{batch.label} {{}} {n:>4}", (), {"batch": batch, "n": 7}), ("{{{}}}", (x,), {}), ("", (), {}),
        ("{:{}} {}", (2.5, ".2f", x), {}), ("{!s:>30}", (x,), {}), ("{:.{n}f}", (x[0],), {"n": 3}),
    ]:  # fmt: skip
        want = text.format(*args, **named)
        assert lines_of(lambda: fr.debug_print(text, *args, **named))[0] == [want]  # noqa: B023


@pytest.mark.parametrize(
    ("text", "args", "what"),
    [
        ("{:.2f}", (torch.ones(3),), "`text` formats field '' as one number"),
        ("{} {}", (torch.ones(3),), "`text` is not a format of these values"),
        ("{:d}", (torch.ones(()),), "`text` is not a format"),
        ("{", (), "`text` is not a format"), ("{name}", (), "`text` is not a format"),
        ("{}", (IDS,), "field '' of `text` is a tree with tensors"), ("{:d}", ("a",), "`text` is not a format"),
    ],
)  # fmt: skip
def test_wrong_formats_raise_before_anything_is_printed(text, args, what):
    """A text that is not a format of its values raises in words, in a program when it is compiled."""
    for run in (fr.debug_print, fr.jit(lambda *args: fr.debug_print(text, *args[1:]))):
        with pytest.raises((ValueError, TypeError), match=what.replace("(", r"\(")) as error:
            run(text, *args)
        assert "got" in str(error.value) and "need" in str(error.value)
