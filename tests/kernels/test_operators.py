"""Operators whose calls run no Python have the bits of Python's functions, and refuse what these refuse."""

import ctypes
import subprocess
import sys
import threading

import pytest
import torch
from funcrec.kernels import choice, cpp, library, ops
from funcrec.kernels.cpp import _native, _operators
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import funcrec as fr

SIZES = st.sampled_from([0, 1, 2, 5, 17, 33])
DTYPES = (torch.float32, torch.float64)
product, total = (lambda *xs, n=n: getattr(torch.ops.funcrec_cpp, n)(*xs) for n in ("invariant_bmm", "invariant_sum"))


@pytest.fixture(autouse=True, scope="module")
def _defined():
    library.load("cpp")


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


FORMS = {  # how x [S, R, C] may lie in memory
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "stacked last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "apart": lambda x: torch.stack([x, x + 1], 1)[:, 0],
    "rows apart": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "columns apart": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "from an offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
    "negative": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "backwards": lambda x: x.flip(0, 1, 2).flip(0, 1, 2),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "of another type": lambda x: x.as_subclass(Other),
    "one matrix": lambda x: x[:1].expand(x.shape) if x.shape[0] else x,
    "one row": lambda x: x[:, :1].expand(x.shape) if x.shape[1] else x,
    "one column": lambda x: x[:, :, :1].expand(x.shape) if x.shape[2] else x,
    "one number": lambda x: x[:1, :1, :1].expand(x.shape) if x.numel() else x,
}


class Other(torch.Tensor):
    """A tensor of a subclass."""


def outcome(call, *args):
    """Return the bits of a call, or the type of its error."""
    try:
        out = call(*args)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return type(error)
    return [out.dtype, out.shape, out.stride(), torch.Tensor(out.detach()).view(torch.uint8).tolist()]


def test_the_operators_are_compiled_here():
    """The compiled object registers all operators that it has, in Python's terms and in the dispatcher's."""
    assert cpp.compiled_operators() == _operators.NAMES <= {*library.SCHEMAS}
    for name in _operators.NAMES:
        assert (
            "operators.cpp" in torch._C._dispatch_dump(f"funcrec_cpp::{name}").partition("CPU: ")[2].partition("\n")[0]
        )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES), st.sampled_from([0, 1, 2, 5]), SIZES, SIZES, SIZES,
    st.sampled_from([*FORMS]), st.sampled_from([*FORMS]),
)  # fmt: skip
def test_an_operator_has_the_bits_of_its_function(dtype, stack, rows, depth, columns, left, right):
    """The operators give the bits, shape and strides of Python's functions, and of the reference, for operands of any
    size, stored in any way."""
    a, b = FORMS[left](noise(stack, rows, depth, dtype=dtype)), FORMS[right](noise(stack, depth, columns, dtype=dtype))
    mine, other = a.resolve_neg().as_subclass(Tensor), b.resolve_neg().as_subclass(Tensor)
    assert outcome(product, a, b) == outcome(cpp.invariant_bmm, mine, other)
    assert torch.equal(ops.invariant_bmm(a, b), ops.invariant_bmm(mine, other, implementation="reference"))
    assert outcome(total, a) == outcome(cpp.invariant_sum, mine)
    assert torch.equal(ops.invariant_sum(b), ops.invariant_sum(other, implementation="reference"))


def freed(x: Tensor) -> Tensor:
    """Return x after its memory was given away."""
    x.untyped_storage().resize_(0)
    return x


def unaligned() -> Tensor:
    return torch.frombuffer(bytearray(1 + 4 * 12), dtype=torch.float32, offset=1, count=12).view(2, 2, 3)


A, B = torch.ones(2, 2, 3), torch.ones(2, 3, 4)
WRONG = {
    "another depth": lambda: (A, B[:, :2]),
    "another stack": lambda: (A, B[:1]),
    "two dtypes": lambda: (A, B.double()),
    "halves": lambda: (A.half(), B.half()),
    "whole numbers": lambda: (A.long(), B.long()),
    "complex numbers": lambda: (A.cfloat(), B.cfloat().conj()),
    "matrices": lambda: (A[0], B[0]),
    "no dims": lambda: (A.sum(), B.sum()),
    "four dims": lambda: (A[None], B[None]),
    "no memory": lambda: (freed(A.clone()), B),
    "no memory on the right": lambda: (A, freed(B.clone())),
    "an odd address": lambda: (unaligned(), B),
    "a sparse operand": lambda: (A.to_sparse(), B),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused(wrong):
    """An operator refuses the operands that Python's function refuses, and `ops` raises the same type with the same
    words."""
    a, b = WRONG[wrong]()
    assert isinstance(outcome(product, a, b), type)
    assert isinstance(outcome(cpp.invariant_bmm, a, b), type)
    with torch.inference_mode(), pytest.raises((ValueError, TypeError, AttributeError, NotImplementedError)) as mine:
        ops.invariant_bmm(a, b)
    if "sparse" not in wrong:
        with pytest.raises(mine.type) as own:
            cpp.invariant_bmm(a, b)
        assert str(own.value) == str(mine.value)
    if not {"two", "another", "right"} & {*wrong.split()}:
        assert isinstance(outcome(total, a), type)


def test_transforms_modes_and_profilers_see_the_operators():
    """Fakes and meta tensors give shapes, vmap gives each member's bits, and a derivative is refused. A mode and a
    profiler see the operator, also in compiled code, which calls it as it is."""
    a, b = noise(3, 2, 5), noise(3, 5, 4)
    with FakeTensorMode() as mode:
        assert product(mode.from_tensor(a), mode.from_tensor(b)).shape == (3, 2, 4)
    assert total(a.to("meta")).shape == (3, 5)
    stacks = noise(6, 3, 2, 5)
    assert torch.equal(torch.vmap(product, (0, None))(stacks, b), torch.stack([product(x, b) for x in stacks]))
    tracked = a.clone().requires_grad_()
    for wanted in (lambda: product(tracked, b), lambda: torch.func.jvp(total, (a,), (a,))):
        with pytest.raises(TypeError, match="has no derivative here"):
            wanted()
    with torch.no_grad():
        assert torch.equal(product(tracked, b), product(a, b))
    a = noise(3, 60, 5)  # more terms than a program adds itself
    program = fr.jit(fr.invariant(lambda a, b: (a @ b).sum(1)))
    want = program(a, b)
    with Names() as seen, torch.profiler.profile() as profile:
        assert torch.equal(program(a, b), want)
    for name in _operators.NAMES:
        assert any(name in x for x in seen.names)
        assert any(name in event.name for event in profile.events())
        assert choice.direct(name) == library.operator("cpp", name)._op


class Names(TorchDispatchMode):
    """A mode that writes down the names of the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def python_calls(call) -> list[str]:
    """Return the names of the functions of Python that run during a call."""
    names = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names[1:]


def test_a_call_runs_no_python():
    """Below autograd, as in packages and compiled programs, an operator calls no function of Python."""
    a, b = noise(1, 3, 5), noise(1, 5, 4)
    run, add = choice.direct("invariant_bmm"), choice.direct("invariant_sum")
    with torch._C._AutoDispatchBelowAutograd():
        assert python_calls(lambda: (run(a, b), run(a.mT.contiguous().mT, b), add(a), add(a.mT))) == []
        assert python_calls(lambda: cpp.invariant_bmm(a, b))


def uses(x: Tensor) -> tuple[int, int]:
    return x._use_count(), sys.getrefcount(x)


def test_a_call_keeps_no_tensor():
    """Neither a call nor a refused call keeps its operands or its result."""
    a, b, turned = noise(2, 3, 5), noise(2, 5, 4), noise(2, 5, 3).permute(0, 2, 1)[:, ::2]
    before = uses(a), uses(b), uses(turned)
    for _ in range(20):
        out = product(a, b)
        product(turned, b), total(turned), total(a)
        for left, right in ((a, a), (a[0], b), (a.half(), b)):
            with pytest.raises(ValueError, match="do not match"):
                product(left, right)
        with pytest.raises(ValueError, match="do not match"):
            total(a[0])
        del left, right
    assert (uses(a), uses(b), uses(turned)) == before and out._use_count() == 1


def test_threads_call_at_once():
    """Threads that call the operators at the same time get their own results."""
    calls = [(noise(1 + k % 3, 1 + k, 30), noise(1 + k % 3, 30, 1 + 2 * k)) for k in range(12)]
    want, wrong = [cpp.invariant_bmm(*xs) for xs in calls], []

    def run(first):
        for i in range(200):
            k = (first + i) % len(calls)
            if not torch.equal(product(*calls[k]), want[k]):
                wrong.append(k)

    threads = [threading.Thread(target=run, args=(3 * i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


WITHOUT = """
import torch
from funcrec.kernels import choice, cpp, library, ops
from funcrec.kernels.cpp import _native

def absent(*args):
    raise OSError("another build of torch")

_native.torch_library = absent
a, b = torch.ones(1, 2, 3), torch.ones(1, 3, 4)
assert library.operator("cpp", "invariant_bmm")(a, b).tolist() == [[[3.0] * 4] * 2]
assert choice.direct("invariant_sum")(a).tolist() == [[2.0] * 3]
assert cpp.compiled_operators() == frozenset()
"""


def test_a_torch_without_the_functions_runs_python():
    """If torch lacks the stable functions, or there is no compiled object, Python's functions are the operators."""
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)
    register = ctypes.CDLL(_native.library()._name).funcrec_operators
    assert register(ctypes.c_void_p(ctypes.CDLL(_native._path(_native.level()))._handle)) == 1
