"""Each implementation's operators give torch the facts that torch needs: schema, shapes, tracing, compiling, vmap.

Every operator `torch.ops.funcrec_<implementation>.*` runs on its own sample. Shapes: B bags, N ids, R rows, D dim.
"""

import functools

import pytest
import torch
from funcrec.kernels import library, ops, reference
from funcrec.kernels.draws import Fresh
from funcrec.kernels.forms import Feature, Segment, flatten
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from funcrec.testing import assert_trees_close

F32, F64, I64 = torch.float32, torch.float64, torch.int64
MAPPED = {  # the positions of the arguments, and of their list members, that vmap batches
    "pooled_lookup": [(0, 0), (1, 0), (3, None)], "pooled_lookup_weights": [(0, None), (1, 1)],
    "gather_rows": [(0, None)],
    "scatter_rows": [(0, None), (3, None)], "expand": [(0, 0), (3, 0)], "coalesce": [(0, 0), (1, 0)],
    "fused_update": [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (5, 0), (7, None), (8, None)], "take_ranges": [(0, None)],
    "take_ranges_transpose": [(0, None)], "bucketize": [(2, None), (0, None)], "owner_blocks": [(0, None)],
    "to_padded": [(0, None)], "from_padded": [(0, None)], "quantized_lookup": [(1, 0), (3, None)],
    "quantized_rows": [(1, None)], "quantize_rows": [(0, None)], "top_k": [(0, None), (1, None)],
    "dot_interaction": [(0, 1)], "dot_interaction_transpose": [(0, None), (1, 0)],
    "bag_extrema": [(0, None)], "bag_extrema_transpose": [(0, None)],
    "invariant_bmm": [(0, None), (1, None)], "invariant_sum": [(0, None)],
    "find_ids": [(0, None), (1, None)], "admit_ids": [(0, 0), (2, None)], "settle_ids": [(0, 1), (2, None)],
    "find_columns": [(0, 0), (1, None)], "admit_columns": [(0, 0), (2, 0)], "settle_columns": [(0, 1), (1, 0)],
    "initial_rows": [(0, None), (1, None)], "draw_rows": [(0, 0), (1, 0), (3, None)],
    "jagged_attention": [(0, None), (2, None), (5, None)], "jagged_attention_transpose": [(0, None), (4, None)],
}  # fmt: skip


def vocabulary_of(generator: torch.Generator) -> list[Tensor]:
    """Return the tensors of a vocabulary of 128 rows, half of them free."""
    tags = torch.randint(0, 256, (128,), generator=generator) * (torch.arange(128) % 2)
    entries = torch.stack([torch.arange(128), torch.arange(128) << 32 >> 4], 1)
    return [tags.to(torch.uint8), entries, torch.randint(0, 3, (128,), generator=generator).to(torch.uint8)]


def samples(dim: int = 4, num_rows: int = 9) -> dict[str, tuple]:
    """Return {operation: arguments in the flat form}, a sample of every operation."""
    generator = torch.Generator().manual_seed(0)
    floats = lambda *shape: torch.randn(shape, generator=generator)
    tables = [floats(num_rows, dim), floats(num_rows, 2 * dim)]
    rows, offsets = torch.randint(-1, 10, (20,), generator=generator), torch.tensor([0, 3, 3, 11, 17])
    weights, d = floats(20), floats(2, 3 * dim)
    features = flatten([Feature(0, 0, 0, 0, True, True, 0), Feature(1, 0, 2, 3, False, True, dim)])
    segments = [Segment(0, 0, 0, 0, 0, 0, 2, 0, True, 0), Segment(1, 0, dim, 0, 0, 2, 2, 3, False, -1)]
    terms = ([d], [rows.clamp(0)], [offsets], [weights], flatten(segments))
    shapes = [num_rows, dim, num_rows, 2 * dim]
    rule = (torch.tensor(0.1, dtype=F64), torch.tensor(3), None, "rowwise_adagrad", [1e-8, 0.0, 0.0, 0.0])
    few = torch.tensor([0, 3, 7])  # bags of pairs: triton's interpreter takes a second for each
    pairs = (floats(8, 2, dim), floats(8, 2, dim), floats(8, 2, 3), few, few, floats(2, 5), floats(1, 6))
    pairs += (rows[:8] * 7, rows[:8] * 5, torch.tensor([1, 9]), 0.5, 1.0, True, True)
    vocabulary, now, ids = vocabulary_of(generator), torch.tensor(9), torch.randint(0, 30, (20,), generator=generator)
    changes = reference.admit_ids(vocabulary, now, ids, torch.tensor(15), None, 1, 3, 2, 1 << 53, 3, 5)
    step = [*vocabulary[:2], now, *vocabulary[2:], *vocabulary_of(generator)[:2], now + 1]
    how, columns = [1, 3, 2, 1 << 53, 3, 5, 0, 0, 0, 1 << 53, 0, 5], [0, 0, 0, 2, 0, 1, 0, 3, 1, 2]
    admitted = [*reference.admit_columns(step, [], [ids], [offsets], how, columns)]
    fresh = flatten([Fresh(0, 1, 0, dim, 0, 0, 0, 3, 0, 1), Fresh(1, 3, 0, 0, 0, 1, 0, 2, 1, 0)])
    coded = [reference.quantize_rows(x, bits) for x, bits in zip(tables, (8, 4))]
    return {
        "quantized_lookup": (coded, [rows], offsets, weights, features, 2, [8, 4], [dim, 2 * dim]),
        "quantized_rows": (coded[1], rows, 4, 2 * dim),
        "quantize_rows": (tables[1], 8, None),
        "pooled_lookup": (tables, [rows], offsets, weights, features, 2),
        "pooled_lookup_weights": (d, tables, [rows], offsets, weights, features),
        "gather_rows": (tables[0], rows),
        "scatter_rows": (tables[0], torch.tensor([3, 1, 5]), torch.tensor(2), floats(3, dim)),
        "expand": (*terms, shapes),
        "coalesce": (*terms, shapes),
        "fused_update": (tables, [torch.ones(num_rows) for _ in tables], *terms, *rule),
        "take_ranges": (tables[1], offsets[1:4], torch.tensor([2, 0, 3]), 7),
        "take_ranges_transpose": (floats(7, dim, 2), offsets[1:4], torch.tensor([2, 0, 3]), num_rows),
        "bucketize": (rows, offsets, weights, 3, 4),
        "owner_blocks": (
            rows,
            offsets,
            [0, 0, 9, 5, 2, 1, 0, 0, 3, 2, 2, 7, 7, 1, 0, 4],
            [0, 1, -1, 0],
            2,
            2,
            6,
            False,
            True,
        ),
        "to_padded": (tables[1], offsets[:3], 3, 0.5),
        "from_padded": (floats(2, 4, dim), offsets[:3], 9),
        "top_k": (floats(4, dim), tables[0], rows, offsets, 5),
        "bag_extrema": (tables[1], offsets[:3], True, True),
        "bag_extrema_transpose": (floats(2, dim), offsets[:3], torch.tensor([[3], [-1]]).expand(2, dim), 9),
        "dot_interaction": ([floats(5, 1, dim), floats(5, 3, dim)],),
        "dot_interaction_transpose": (floats(5, 6), [floats(5, 1, dim), floats(5, 3, dim)]),
        "invariant_bmm": (floats(2, 3, dim), floats(2, dim, 5)),
        "invariant_sum": (floats(2, 9, 3),),
        "find_ids": (*vocabulary[:2], ids, torch.tensor(15), 3, 5),
        "admit_ids": (vocabulary, now, ids, torch.tensor(15), None, 1, 3, 2, 1 << 53, 3, 5),
        "settle_ids": (vocabulary, now, ids, *(changes[i] for i in (0, 6, 1, 2, 5, 7)), 2, 5),
        "find_columns": (vocabulary[:2] + step[4:6], ids, offsets, [3, 5, 0, 7], columns),
        "admit_columns": (step, [], [ids], [offsets], how, columns),
        "settle_columns": (step, [ids], [offsets], admitted, how, columns),
        "initial_rows": (torch.tensor(7), rows, dim, 1, 0.5, F32),
        "draw_rows": (
            tables,
            [floats(2, 2 * dim)],
            torch.tensor([3, 1, 5]),
            rows,
            torch.tensor([2, 1]),
            rows[:2],
            fresh,
            [0.5, 0.0],
        ),
        "jagged_attention": pairs,
        "jagged_attention_transpose": (floats(8, 2, 3), *reference.jagged_attention(*pairs), *pairs),
    }


def clone(args):
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)


def to(args, device: str):
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, args)


@pytest.fixture
def call(implementation, operation):
    return library.operator(implementation, operation)


def in_place(implementation: str, name: str):
    """Return the operator that writes to its first argument or arguments, or None if no such operator exists."""
    return getattr(getattr(torch.ops, f"funcrec_{implementation}"), f"{name}_", None)


@pytest.mark.needs(without="reference")
def test_opcheck(implementation, device, operation, call):
    """The schema declares the writes. Fake tensors give the shapes. torch can trace and compile the operator.

    An operator of every implementation has one wrapper and one function of shapes. So the C++ operators alone, which
    are all, are compiled for sizes that vary.
    """
    args, cheap = to(samples()[operation], device), ("test_schema", "test_autograd_registration", "test_faketensor")
    every = (*cheap, "test_aot_dispatch_dynamic") if implementation == "cpp" else cheap
    torch.library.opcheck(call, args, test_utils=every)
    # the quantiser of FBGEMM takes no key
    if operation == "quantize_rows" and implementation != "fbgemm":
        torch.library.opcheck(call, (*args[:2], torch.tensor(7, device=device)), test_utils=every)
    writing = in_place(implementation, operation)
    if writing is not None:
        torch.library.opcheck(writing.default, clone(args), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.needs("fused_update")
@pytest.mark.parametrize("name", library.IN_PLACE)
def test_the_form_in_place_writes_what_the_pure_one_returns(implementation, device, name):
    """`name_` leaves in its first arguments the bits that `name` returns. No other argument changes."""
    call, args, before = (
        library.operator(implementation, name),
        to(samples()[name], device),
        to(samples()[name], device),
    )
    if call is None:
        assert in_place(implementation, name) is None
        return
    want = call(*args)
    assert_trees_close(args, before)
    assert in_place(implementation, name)(*args) is None
    rest = library.WRITTEN[name]
    assert_trees_close([*args[0], *args[1]] if rest == 2 else args[0], want)
    assert_trees_close(args[rest:], before[rest:])


def huge(name: str) -> tuple[tuple, list[tuple]]:
    """Return arguments with tables of 2³³ rows and buffers of 2³² ids on the meta device, and the result's shapes."""
    empty = functools.partial(torch.empty, device="meta")
    num_rows, n, many = 2**33, 2**32, 2**31 + 7
    tables, rows, offsets = [empty(num_rows, 64)], [empty(n, dtype=I64)], empty(many + 1, dtype=I64)
    weights, d, step = empty(n), empty(many, 64), empty((), dtype=I64)
    vocabulary = [empty(num_rows, dtype=torch.uint8), empty(num_rows, 2, dtype=I64), empty(num_rows, dtype=torch.uint8)]
    terms = ([d], rows, [offsets], [weights], flatten([Segment(0, 0, 0, 0, 0, 0, many, 0, True, 0)]))
    lookup = (rows, offsets, weights, flatten([Feature(0, 0, 0, 0, True, True, 0)]))
    rule = (empty((), dtype=F64), step, None, "rowwise_adagrad", [1e-8, 0.0, 0.0, 0.0])
    pairs = (*[empty(n, 2, 64)] * 3, offsets, offsets, empty(2, 9), None, None, None, None, 0.5, 1.0, True, True)
    attended = empty(n, 2, 64), empty(n, 2)
    return {
        "jagged_attention": (pairs, [(n, 2, 64), (n, 2)]),
        "find_ids": ((*vocabulary[:2], rows[0], step, 3, 5), [(n,)]),
        "admit_ids": ((vocabulary, step, rows[0], step, None, 1, 3, 2, 1 << 53, 3, 5), [*[(n,)] * 7, (4,)]),
        "settle_ids": (
            (vocabulary, step, *[rows[0]] * 6, empty(4, dtype=I64), 2, 5),
            [(num_rows,), (num_rows, 2), (num_rows,)],
        ),
        "find_columns": ((vocabulary[:2], rows[0], offsets, [3, 5], [0, 0, 0, many, 2]), [(n,)]),
        "admit_columns": (
            ([*vocabulary[:2], step], [], rows, [offsets], [0, 0, 0, 1 << 53, 3, 5], [0, 0, 0, many, 2]),
            [*[(n,)] * 5, (1, 4)],
        ),
        "settle_columns": (
            ([*vocabulary[:2], step], rows, [offsets], [*rows * 5, empty(1, 4, dtype=I64)], [0, 0, 0, 1, 3, 5], []),
            [(num_rows,), (num_rows, 2), ()],
        ),
        "initial_rows": ((step, rows[0], 64, 1, 0.5, F32), [(n, 64)]),
        "draw_rows": (
            (tables, [], rows[0], rows[0], offsets, offsets, [0, 1, 0, 64, 0, 0, 0, n, 0, 0], [0.5]),
            [(num_rows, 64)],
        ),
        "jagged_attention_transpose": ((attended[0], *attended, *pairs), [(n, 2, 64)] * 3 + [(2, 9), (0, 0)]),
        "pooled_lookup": ((tables, *lookup, many), [(many, 64)]),
        "pooled_lookup_weights": ((d, tables, *lookup), [(n,)]),
        "gather_rows": ((tables[0], rows[0]), [(n, 64)]),
        "scatter_rows": ((tables[0], rows[0], step, empty(n, 64)), [(num_rows, 64)]),
        "expand": ((*terms, [num_rows, 64]), [(n,), (n, 64)]),
        "coalesce": ((*terms, [num_rows, 64]), [(n,), (n, 64), (), (n,)]),
        "fused_update": ((tables, [empty(num_rows)], *terms, *rule), [(num_rows, 64), (num_rows,)]),
        "take_ranges": ((weights, offsets[1:], offsets[1:], n + 1), [(n + 1,), (many + 1,)]),
        "take_ranges_transpose": ((empty(n, 64), offsets[1:], offsets[1:], n + 1), [(n + 1, 64)]),
        "bucketize": ((rows[0], offsets, weights, 16, 2**29), [(n,), (16 * many,), (n,), (n,)]),
        "owner_blocks": (
            (rows[0], offsets, [0, 0, 9, 9, 1, 0, 0], [0], many, 1, n, False, True),
            [(1, n + many), (1,), (n,)],
        ),
        "to_padded": ((empty(n, 64), offsets, 9, 0.0), [(many, 9, 64)]),
        "quantized_lookup": (([empty(num_rows, 36, dtype=torch.uint8)], *lookup, many, [4], [64]), [(many, 64)]),
        "quantized_rows": ((empty(num_rows, 36, dtype=torch.uint8), rows[0], 4, 64), [(n, 64)]),
        "quantize_rows": ((tables[0], 2), [(num_rows, 20)]),
        "from_padded": ((empty(many, 9, 64), offsets, n), [(n, 64)]),
        "bag_extrema": ((empty(n, 64), offsets, True, True), [(many, 64), (many, 64)]),
        "bag_extrema_transpose": ((d, offsets, empty(many, 64, dtype=I64), n), [(n, 64)]),
        "dot_interaction": (([empty(many, 1, 64), empty(many, 2, 64)],), [(many, 3)]),
        "dot_interaction_transpose": ((empty(many, 3), [empty(many, 3, 64)]), [(many, 3, 64)]),
        "top_k": ((empty(many, 64), tables[0], rows[0], offsets, 9), [(many, 9), (many, 9)]),
        "invariant_bmm": ((empty(1, n, 64), empty(1, 64, 3)), [(1, n, 3)]),
        "invariant_sum": ((empty(n, 64, 3),), [(n, 3)]),
    }[name]


# on the meta device, torch's cumsum makes a square of its argument
@pytest.mark.needs(without="reference")
def test_shapes_beyond_i32(operation, call):
    """Tables, buffers and offsets larger than 2³¹ give the right shapes, computed from shapes alone."""
    args, shapes = huge(operation)
    out = call(*args)
    assert [tuple(x.shape) for x in ([out] if isinstance(out, Tensor) else out)] == shapes


@pytest.mark.needs("coalesce")
def test_rows_beyond_i32(ask):
    """coalesce keeps rows above 2³¹ apart."""
    rows = torch.tensor([2**33, 1, 2**33, 2**33 + 1, 2**40])
    terms = ops.Terms([torch.ones(5, 1)], [rows], [], [], [Segment(0, 0, 0, 0, -1, 0, 5, 0, False, -1)])
    ((r, g, count, repeats),) = ask("coalesce", terms, [(2**34, 1)])
    assert r.tolist() == [1, 2**33, 2**33 + 1, -1, -1] and g.flatten().tolist() == [1.0, 2.0, 1.0, 0.0, 0.0]
    assert int(count) == 3 and repeats.tolist() == [1, 2, 1, 0, 0]


@pytest.mark.needs()
def test_tracing(implementation, device, operation, call):
    """make_fx on fake tensors reads no value. The traced graph gives the same values as the eager call. The graph calls
    the implementation's operator once."""
    args = to(samples()[operation], device)
    traced = make_fx(lambda *a: call(*a), tracing_mode="fake")(*args)
    by_layout = implementation == "reference" and "attention" in operation  # it pads bags only if it can read lengths
    near = {"rtol": 1e-5, "atol": 1e-6} if by_layout else {}
    assert_trees_close(traced(*args), call(*args), **near)
    if implementation != "reference":
        assert [n.target for n in traced.graph.nodes if n.op == "call_function" and n.target == call] == [call]


@pytest.mark.needs(without="reference")
def test_compiling(implementation, device, known):
    """One compiled function of all operators gives the operators' eager values. A slow implementation, whose operators
    are all traced one by one, has every fourth."""
    calls = {n: c for n in samples() if (c := library.operator(implementation, n)) is not None}
    calls = dict([*calls.items()][:: 4 if known.slow else 1])
    args = to({n: samples()[n] for n in calls}, device)
    run = lambda args: {n: call(*args[n]) for n, call in calls.items()}
    torch.compiler.reset()
    assert_trees_close(torch.compile(run, fullgraph=True, backend="aot_eager")(args), run(args))


@pytest.mark.parametrize("implementation", ["cpp"])
def test_compiling_with_inductor(implementation, device):
    """Under Inductor operators run between generated code before and after them. No argument is written."""
    lookup, scatter = (library.operator(implementation, n) for n in ("pooled_lookup", "scatter_rows"))
    args, (table, *rest) = to((samples()["pooled_lookup"], samples()["scatter_rows"]), device)
    run = lambda table: lookup([scatter(2 * table, *rest), args[0][1]], *args[1:]) + 1
    torch.compiler.reset()
    want = run(table)
    assert_trees_close(torch.compile(run, fullgraph=True)(table), want)
    assert_trees_close(run(table), want)


def with_members(args: tuple, members: dict) -> list:
    """Return args with members[(position, position in the list or None)] in their places."""
    out = [list(x) if isinstance(x, list) else x for x in args]
    for (i, j), x in members.items():
        if j is None:
            out[i] = x
        else:
            out[i][j] = x
    return out


def as_list(out) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


@pytest.mark.needs(without="reference", slow=4)
def test_vmap_is_a_loop(device, operation, call, known):
    """Any arguments may carry a batch, at any dimension, in one vmap or two. The result stacks the results of the
    single calls."""
    args, size = to(samples()[operation], device), 2
    variant = lambda x, i: (1 + i) * x if x.is_floating_point() else x.roll(i, 0) if x.dim() else x + i

    @settings(max_examples=1 if known.slow else 4)
    @given(st.data())
    def law(data):
        places = data.draw(st.lists(st.sampled_from(MAPPED[operation]), min_size=1, unique=True))
        own = {(i, j): args[i] if j is None else args[i][j] for i, j in places}
        dims = {at: data.draw(st.integers(0, x.dim())) for at, x in own.items()}
        calls = [call(*with_members(args, {at: variant(x, i) for at, x in own.items()})) for i in range(size)]
        want = [torch.stack(x) for x in zip(*map(as_list, calls))]
        batch = {at: torch.stack([variant(x, i) for i in range(size)], dims[at]) for at, x in own.items()}
        in_dims = with_members([[None] * len(x) if isinstance(x, list) else None for x in args], dims)
        in_dims = tuple(d if isinstance(d, int) or (d and any(x is not None for x in d)) else None for d in in_dims)
        once = torch.func.vmap(call, in_dims=in_dims)
        assert_trees_close(as_list(once(*with_members(args, batch))), want)
        if not known.slow:
            first = places[0]
            outer = lambda x: as_list(once(*with_members(args, {**batch, first: x})))
            twice = torch.func.vmap(outer)(torch.stack([batch[first]] * 2))
            assert_trees_close(twice, [torch.stack([x, x]) for x in want])

    law()
