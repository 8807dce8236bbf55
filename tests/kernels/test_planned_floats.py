"""Lookups and updates of float tables, described in C++, have the bits of those described in Python."""

import threading

import pytest
import torch
from funcrec.kernels import choice, cpp, library, ops
from funcrec.kernels.cpp import _lookup, _native, _planned, _planned_update, _update
from programs.update_calls import CASES, make, numbers
from torch.utils._python_dispatch import TorchDispatchMode

import funcrec as fr

BAGS, LR, STEP = 4, torch.tensor(0.1, dtype=torch.float64), torch.tensor(4)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def outcome(call, *args):
    """Return the result of a call, or (the type of its error, the error's text)."""
    try:
        return call(*args)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)


def in_python(call, *args):
    """Return the outcome of a call whose tensors are all described in Python."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_planned, "_runner", lambda path, name: (None, 0))
        return outcome(call, *args)


def is_same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def lookup_call(seed: int, weights: torch.dtype | None = None) -> tuple:
    """Return the arguments of a lookup of two or three tables, with ids outside of them and wild offsets."""
    torch.manual_seed(seed)
    count, ints = 2 + seed % 2, (torch.int64, torch.int32)[seed % 3 % 2]
    tables = [torch.randn(3 + t, (5, 16, 1)[(t + seed) % 3]).to(DTYPES[(t + seed // 3) % 3]) for t in range(count)]
    rows = [torch.randint(-2, 8, (12,), dtype=ints) for _ in range(1 + seed % 2)]
    offsets = torch.randint(-3, 16, (count * BAGS + 1,), dtype=ints).sort().values
    features, column = [], 0
    for t, x in enumerate(tables):
        weighted = weights is not None and t % len(rows) == 0
        features.append(ops.Feature(t, t % len(rows), t * BAGS, seed % 4, bool(t % 2), weighted, column))
        column += x.shape[1]
    own = None if weights is None else torch.randn(12).to(weights)
    return tables, rows, offsets, own, features, BAGS


@pytest.mark.parametrize("weights", [None, torch.float32, torch.float64, torch.float16])
def test_a_lookup_has_the_bits_of_one_described_in_python(weights):
    """A lookup gives the same bits whether C++ or Python describes its tensors, with ids of both widths, tables of
    three dtypes, several buffers of ids, and weights."""
    for seed in range(12):
        given = lookup_call(seed, weights)
        assert is_same(ops.pooled_lookup(*given), in_python(ops.pooled_lookup, *given))
        assert is_same(ops.pooled_lookup(*given), in_python(ops.pooled_lookup, *given))  # by a plan that was kept


def updated(case, shapes, dtype, seed):
    """Return the tables and slots after an update, as one vector."""
    rule, options = case
    hyper, own = numbers(rule, options), make(shapes, torch.float32, seed)
    own = own._replace(weights=[x.float() for x in own.weights], d=[x.contiguous() for x in own.d])
    optimizer = getattr(fr.optim, rule)(lr=0.1, **options)
    tables = {f"t{i}": torch.randn(s).to(dtype) for i, s in enumerate(shapes)}
    slots = optimizer.init(tables)
    flat = [x for each in slots.values() for x in each.values()]
    library.function("cpp", "fused_update_")([*tables.values()], flat, *own[:5], LR, STEP, None, rule, hyper)
    return torch.cat([x.flatten().double() for x in (*tables.values(), *flat)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_update_has_the_bits_of_one_described_in_python(case):
    """An update gives the same bits whether C++ or Python describes its tensors, for every rule, and for tables of f32
    and 16 bits."""
    for seed, dtype in enumerate(DTYPES):
        shapes = [(5 + seed, 16), (9, 5)]
        for _ in range(2):  # The second call has a plan that was kept.
            assert is_same(updated(case, shapes, dtype, seed), in_python(updated, case, shapes, dtype, seed))


def arguments(**changed):
    """Return the arguments of an update of two tables by row-wise Adagrad, some of them changed."""
    own = make([(6, 4), (7, 4)], seed=3)
    given = {
        "tables": [torch.ones(6, 4), torch.ones(7, 4)], "slots": [torch.ones(6), torch.ones(7)],
        "d": [x.contiguous() for x in own.d], "rows": own.rows, "offsets": own.offsets,
        "weights": [x.float() for x in own.weights], "segments": own.segments, "lr": LR, "step": STEP, "key": None,
        "rule": "rowwise_adagrad", "hyper": numbers("rowwise_adagrad", {}), "first": None, "dims": [], "numbers": None,
    }  # fmt: skip
    return [*(given | changed).values()]


def freed(x):
    """Return x after its memory was given away."""
    x.untyped_storage().resize_(0)
    return x


CHANGED = {
    "tables of another width": lambda: {"tables": [torch.ones(6, 4), torch.ones(7, 3)]},
    "a table of f64": lambda: {"tables": [torch.ones(6, 4), torch.ones(7, 4).double()]},
    "a table of one number": lambda: {"tables": [torch.tensor(1.0), torch.ones(7, 4)]},
    "a cotangent of one number": lambda: {"d": [torch.tensor(1.0), *arguments()[2][1:]]},
    "a strided table": lambda: {"tables": [torch.ones(6, 4), torch.ones(4, 7).t()]},
    "a slot that is too short": lambda: {"slots": [torch.ones(6), torch.ones(6)]},
    "a slot of another dtype": lambda: {"slots": [torch.ones(6), torch.ones(7).half()]},
    "a strided slot": lambda: {"slots": [torch.ones(6), torch.ones(14)[::2]]},
    "too few slots": lambda: {"slots": [torch.ones(6)]},
    "strided cotangents": lambda: {"d": [torch.randn(40, 41).t()[: len(x), : x.shape[1]] for x in arguments()[2]]},
    "cotangents of f16": lambda: {"d": [x.half() for x in arguments()[2]]},
    "short weights": lambda: {"weights": [x[:3] for x in arguments()[5]]},
    "weights of both widths": lambda: {"weights": [arguments()[5][0], arguments()[5][1].double()]},
    "ids of floats": lambda: {"rows": [x.float() for x in arguments()[3]]},
    "strided ids": lambda: {"rows": [x.repeat_interleave(2)[::2] for x in arguments()[3]]},
    "no boundary": lambda: {"offsets": [x[:0] for x in arguments()[4]]},
    "short offsets": lambda: {"offsets": [x[:5] for x in arguments()[4]]},
    "a rate of f32": lambda: {"lr": torch.tensor(0.1)},
    "a rate without memory": lambda: {"lr": freed(LR.clone())},
    "a step without memory": lambda: {"step": freed(STEP.clone())},
    "a step of i32": lambda: {"step": torch.tensor(4, dtype=torch.int32)},
    "a rate of two numbers": lambda: {"lr": torch.ones(2, dtype=torch.float64)},
    "a parameter": lambda: {"tables": [torch.ones(6, 4), torch.nn.Parameter(torch.ones(7, 4), requires_grad=False)]},
    "another epsilon": lambda: {"hyper": [0.5, *arguments()[11][1:]]},
    "an unknown rule": lambda: {"rule": "adagradd"},
    "too few hyper-parameters": lambda: {"hyper": arguments()[11][:-1]},
    "numbers as a tensor": lambda: {"numbers": torch.tensor(arguments()[11], dtype=torch.float64)},
}


@pytest.mark.parametrize("changed", CHANGED)
def test_an_unusual_update_has_the_outcome_of_one_described_in_python(changed):
    """After usual calls, a call with other tensors has the bits, or raises the error, of a call described in Python;
    an error leaves tables and slots as they were."""
    run, results = library.function("cpp", "fused_update_"), []
    for way in (outcome, in_python):
        for _ in range(2):
            run(*arguments())
        given = arguments(**CHANGED[changed]())
        before = [x.clone() for x in (*given[0], *given[1])]
        found = way(run, *given)
        results.append((found, [x.detach().double() for x in (*given[0], *given[1])]))
        assert not isinstance(found, tuple) or all(map(torch.equal, before, (*given[0], *given[1])))
    (first, mine), (second, other) = results
    assert first == second and all(map(torch.equal, mine, other))


@pytest.mark.parametrize(
    "unusual", ["stacks", "f64", "strided", "short weights", "short offsets", "parameter", "short of a dim"]
)
def test_an_unusual_lookup_has_the_outcome_of_one_described_in_python(unusual):
    """Stacks, tables of f64, strided ids, subclasses, and what raises: all as described in Python."""
    run = library.function("cpp", "pooled_lookup")
    tables, rows, offsets, weights, features, bags = lookup_call(2, torch.float32)
    flat = [int(n) for f in features for n in f]
    run(tables, rows, offsets, weights, flat, bags)
    given = {
        "stacks": (tables, [torch.stack([x, x]) for x in rows], offsets, weights),
        "f64": ([x.double() for x in tables], rows, offsets, weights),
        "strided": (tables, [x.repeat_interleave(2)[::2] for x in rows], offsets, weights),
        "short weights": (tables, rows, offsets, weights[:5]),
        "short offsets": (tables, rows, offsets[:-1], weights),
        "short of a dim": ([torch.tensor(1.0), *tables[1:]], rows, offsets, weights),
        "parameter": ([torch.nn.Parameter(x, requires_grad=False) for x in tables], rows, offsets, weights),
    }[unusual]
    assert is_same(outcome(run, *given, flat, bags), in_python(run, *given, flat, bags))
    assert ("short" in unusual) == isinstance(outcome(run, *given, flat, bags), tuple)


def test_usual_calls_are_not_described_in_python(monkeypatch):
    """The second of two like calls reads no attribute of its tensors in Python, whatever the tensors' addresses and
    lengths. A list that a caller changes after a call belongs to another call."""
    given, own = lookup_call(1), arguments()
    flat, run = [int(n) for f in given[4] for n in f], library.function("cpp", "pooled_lookup")
    update = library.function("cpp", "fused_update_")
    run(*given[:4], flat, BAGS), update(*own)
    never = lambda *args: pytest.fail("described in Python")
    monkeypatch.setattr(_lookup, "_described", never)
    monkeypatch.setattr(_planned_update, "described_update", never)
    monkeypatch.setattr(_update, "described_update", never)
    longer = [torch.cat([x, x]) for x in given[0]], [torch.cat([x, x]) for x in given[1]], *given[2:4]
    assert torch.equal(
        run(*longer, [*flat], BAGS), ops.pooled_lookup(*longer, given[4], BAGS, implementation="reference")
    )
    update(*arguments(tables=[torch.ones(60, 4), torch.ones(1, 4)], slots=[torch.ones(60), torch.ones(1)]))
    flat[6], flat[13] = given[0][1].shape[1], 0
    with pytest.raises(pytest.fail.Exception):
        run(*given[:4], flat, BAGS)


def test_lazy_negatives_have_the_values_that_torch_shows():
    """A table, weights or cotangents whose memory has the other sign, such as the imaginary part of a conjugate, give
    the results of their values."""
    part = torch.complex(torch.zeros(1, 1), torch.ones(1, 1)).conj().imag
    assert part.is_neg() and part.is_contiguous()
    of_one = [torch.tensor([0])], torch.tensor([0, 1])
    for weighted in (False, True):
        feature, weights = [ops.Feature(0, 0, 0, 0, False, weighted, 0)], part[0] if weighted else None
        assert ops.pooled_lookup([part], *of_one, weights, feature, 1).item() == (1 if weighted else -1)
    terms = ops.Terms([part], of_one[0], [of_one[1]], [], [ops.Segment(0, 0, 0, 0, 0, 0, 1, 0, False, -1)])
    (table,), _ = ops.fused_update([part], [[]], terms, LR, STEP, None, "sgd", numbers("sgd", {}))
    torch.testing.assert_close(table, torch.full((1, 1), -0.9))
    got, want = (ops.top_k(x, torch.tensor([[1.0], [2.0]]), None, None, 1) for x in (part, part.resolve_neg()))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for queries, items in ((part, torch.ones(1, 1)), (torch.ones(1, 1), part)):
        assert fr.top_k(queries, items, 1)[0].item() == -1


def test_an_update_refuses_hyper_parameters_that_autograd_follows():
    """An update by hyper-parameters as a tensor raises if the tensor is tracked, and does not drop its graph."""
    terms = ops.Terms(
        [torch.ones(1, 2)], [torch.tensor([0])], [], [], [ops.Segment(0, 0, 0, 0, -1, 0, 1, 0, False, -1)]
    )
    own = torch.tensor(numbers("sgd", {}), dtype=torch.float64, requires_grad=True)
    call = lambda: ops.fused_update([torch.ones(2, 2)], [[]], terms, LR, STEP, None, "sgd", own.tolist(), numbers=own)
    with pytest.raises(TypeError, match="has no derivative here"):
        call()
    with torch.no_grad():
        assert not call()[0][0].requires_grad


def test_a_zero_keeps_its_sign_as_hyper_parameter():
    """Hyper-parameters that compare equal and have other bits belong to other plans."""
    hyper = numbers("sgd", {})
    call = lambda zero: arguments(rule="sgd", slots=[], hyper=[zero] * len(hyper))
    _planned_update._plans.clear()
    for zero in (0.0, -0.0):
        library.function("cpp", "fused_update_")(*call(zero))
    assert len(_planned_update._plans) == 2


def test_threads_share_plans():
    """Threads that call with more forms than plans are kept for each get their own results."""
    calls = [lookup_call(seed) for seed in range(2 * _planned.MOST)]
    want, wrong = [in_python(ops.pooled_lookup, *c) for c in calls], []

    def run(first):
        for i in range(3 * len(calls)):
            k = (first + i) % len(calls)
            if not torch.equal(ops.pooled_lookup(*calls[k]), want[k]):
                wrong.append(k)

    threads = [threading.Thread(target=run, args=(7 * i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(_lookup._plans) <= _planned.MOST


class Names(TorchDispatchMode):
    """A mode that writes down the names of the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_compiled_code_calls_operators_directly_unless_something_observes():
    """A compiled lookup skips torch's dispatcher. A dispatch mode and a profiler see its operator nevertheless."""
    table, features = {"t": torch.randn(9, 4)}, [fr.FeatureConfig("f", table="t")]
    ids = fr.KeyedJaggedTensor.from_lists({"f": [[1, 2], [3]]})
    look = fr.jit(lambda t, ids: fr.lookup(t, ids, features).values * 2)
    want = look(table, ids)
    with Names() as mode:
        assert torch.equal(look(table, ids), want)
    assert any("pooled_lookup" in name for name in mode.seen)
    with torch.profiler.profile() as profile:
        assert torch.equal(look(table, ids), want)
    assert any("pooled_lookup" in event.name for event in profile.events())
    assert choice.direct("pooled_lookup") is choice.direct("pooled_lookup")


def test_every_function_that_runs_first_belongs_to_an_operation():
    """The functions for usual arguments are those of operations that exist, with the same parameters."""
    for name, usual in cpp.USUAL.items():
        own = getattr(cpp, name).__annotations__.keys() - {"return"}
        assert own == usual.__annotations__.keys() - {"return"}
    assert _native.library().funcrec_abi() == _native.ABI
