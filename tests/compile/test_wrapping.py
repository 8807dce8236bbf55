"""Integers in compiled programs wrap as in eager mode, whatever Inductor's expressions and the C++ compiler assume."""

import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.surroundings import on_threads
from torch._inductor import cpp_builder, cpu_vec_isa

import funcrec as fr
from funcrec.compile.backend import _inductor

FACTOR = -4658895280553007687
COUNTERS = {
    "a sum": lambda k: k + torch.arange(200) * 2**56,
    "a hash": lambda k: ((torch.arange(300) * FACTOR + k) >> 58) & 63,
    "counts": lambda k: k.new_zeros(64).scatter_add(0, ((torch.arange(300) * FACTOR + k) >> 58) & 63, k.new_ones(300)),
    "keys": lambda k: torch.func.vmap(lambda i: fr.fold_in(k, i))(torch.arange(200)),
    "few keys": lambda k: torch.func.vmap(lambda i: fr.fold_in(k, i))(torch.arange(37)),
    "drawn ids": lambda k: (
        fr.data.take(fr.data.random_rows(k, {"a": 1000}, ids_per_bag=2), torch.arange(200)).ids.values
    ),
    "a quotient": lambda k: k + (torch.arange(200) * 2**56) // 2**56,
    "a remainder": lambda k: k + (torch.arange(200) * 2**56) % 97,
    "a least one": lambda k: torch.minimum(torch.arange(200) * 2**56 + k, torch.arange(200)),
    "a square": lambda k: k + (torch.arange(200) * 2**40).square(),
    "through u8": lambda k: k + torch.arange(300).to(torch.uint8).to(torch.int64),
    "through i8": lambda k: k + torch.arange(300, dtype=torch.int32).to(torch.int8) // 3,
    "through i32": lambda k: k + (torch.arange(200, dtype=torch.int32) * 2**28).to(torch.int64),
    "through f16": lambda k: k + torch.arange(5000).to(torch.float16).to(torch.int64),
    "through f32": lambda k: k + (torch.arange(300) * 2**18 + 1).to(torch.float32).to(torch.int64),
    "through bool": lambda k: k + torch.arange(300).to(torch.bool).to(torch.int64) + 1,
    "an index": lambda k: torch.arange(64)[(torch.arange(200) * 2**61) // 2**58] + k,
    "an i32 index": lambda k: torch.arange(64)[((torch.arange(200, dtype=torch.int32) * 2**29) // 2**26).long()] + k,
    "an index that is cut": lambda k: (
        (k + torch.arange(40)).unfold(0, 3, 2).reshape(-1)[(torch.arange(7) - 2**62).clamp(0, 7)]
    ),
    "an index from the end": lambda k: torch.arange(64)[-1 - torch.arange(64)] + k,
}
IDS = {
    "a factor there and back": lambda x: (x * 3) // 3,
    "a square's size": lambda x: (x * x).abs(),
    "a square's remainder": lambda x: torch.remainder(x * x, 97),
    "a comparison": lambda x: x - 2**62 - 2**62 < x,
    "a hash": lambda x: ((x ^ (x >> 30)) * FACTOR) >> 31,
    "a sum": lambda x: (x + x + x) > x,
    "a negative": lambda x: -x < 0,
    "a running sum": lambda x: x.cumsum(0),
}


def agree(functions, *arguments):
    """Check that all functions, compiled as one function, give their eager values."""
    names = list(functions)
    got = fr.jit(lambda *x: [functions[n](*x) for n in names])(*arguments)
    wrong = [n for n, x in zip(names, got, strict=True) if not torch.equal(x, functions[n](*arguments))]
    assert not wrong


def test_expressions_of_counters_wrap():
    """Values computed from `arange` wrap in their own dtype. Each later use as an index is checked."""
    agree(COUNTERS, fr.key(3))


def test_ids_wrap():
    """Arithmetic on ids wraps in the vector part of a loop, in its tail, and in loops without vectors."""
    few = torch.tensor([2**62 + 12345, -(2**63) + 5, 7123456789123456789])
    xs = {size: torch.cat([few, fr.split(fr.key(size), 64)])[:size] for size in (1, 3, 8, 67)}
    agree({(n, size): lambda xs, f=f, size=size: f(xs[size]) for n, f in IDS.items() for size in xs}, xs)


def test_a_scalar_wraps():
    """Arithmetic on one number wraps."""
    agree({n: f for n, f in IDS.items() if n != "a running sum"}, torch.tensor(2**62 + 12345))


U8, I8 = torch.uint8, torch.int8
NARROW = {
    "most": lambda x: torch.arange(31).to(I8).amax(),
    "least": lambda x: (-torch.arange(31, dtype=I8)).amin(),
    "where": lambda x: torch.arange(20).to(I8).argmax(),
    "a sum": lambda x: (torch.arange(200).to(U8) + x[0]).sum(dtype=U8),
    "a product": lambda x: (torch.arange(37, dtype=U8) * 2 + 1).prod(dtype=U8),
    "a wide sum": lambda x: torch.arange(37).to(U8).sum() + (torch.arange(37).to(U8) + 250).sum(dtype=U8),
    "beside others": lambda x: (torch.arange(200).to(U8) * x).sum(dtype=U8),
    "by rows": lambda x: (torch.arange(200, dtype=U8)[None] + x[:50, None]).amax(1),
    "by columns": lambda x: (torch.arange(200, dtype=U8)[:, None] + x[:50]).amax(0),
    "given": lambda x: x.sum(dtype=U8),
    "given, by rows": lambda x: (x.view(20, 10).to(I8) - 9).amax(1),
    "its place": lambda x: (x.view(20, 10).to(I8) - 9).max(1).indices,
    "its least": lambda x: (x.view(20, 10) + 9).min(1).values,
    "i16": lambda x: (torch.arange(100).to(torch.int16) * 3).amax(),
    "f16": lambda x: torch.arange(100).to(torch.float16).amax() + x[0],
    "bf16": lambda x: torch.arange(45).to(torch.bfloat16).sum(),
    "a signed zero": lambda x: torch.cat([1 / -torch.arange(9.0), 1 / (torch.arange(9).double() * -1).float()]) * x[1],
}


def test_counters_of_few_bits_are_reduced():
    """A reduction of an 8- or 16-bit counter covers all elements of the counter. A negative zero keeps its sign."""
    agree(NARROW, torch.arange(200, dtype=torch.uint8) % 7)


def test_several_threads_add_to_one_place():
    """A loop of several threads adds every element when all lanes of a vector have the same index."""
    with on_threads(4):
        first, last = torch.arange(156) * 7 % 1, torch.full((156,), 2)
        sums = {
            "i8": lambda x: torch.zeros(1, dtype=torch.int8).index_put((first,), x.to(torch.int8), accumulate=True),
            "f32": lambda x: torch.zeros(3).index_put((last,), x.float(), accumulate=True),
            "i64": lambda x: x.new_zeros(3).scatter_add(0, last, x),
        }
        agree(sums, torch.arange(156))


INTEGERS = st.sampled_from([1, -1, 3, 97, 2**31 - 1, 2**31, -(2**33), 2**56, 2**62 + 1, -(2**63), FACTOR])
STEPS = {
    "+": lambda x, c: x + c,
    "*": lambda x, c: x * c,
    # in eager torch, too, the least integer divided by -1 ends the process
    "//": lambda x, c: x // c if c != -1 else -x,
    "%": lambda x, c: torch.remainder(x, c) if c != -1 else x,
    ">>": lambda x, c: x >> (abs(c) % 63),
    "^": lambda x, c: x ^ c,
    "min": lambda x, c: x.clamp(max=c),
    "i32": lambda x, c: x.to(torch.int32).to(torch.int64),
    "u8": lambda x, c: x.to(torch.uint8).to(torch.int64),
    "<": lambda x, c: (x < c).to(torch.int64),
}
PROGRAMS = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), INTEGERS), min_size=1, max_size=6)
MANY = st.lists(st.tuples(PROGRAMS, st.integers(1, 300)), min_size=30, max_size=30)


@settings(max_examples=1)
@given(MANY.filter(lambda many: len({str(p) for p in many}) > 20))  # the first example would be 30 times one program
def test_generated_arithmetic_wraps(programs):
    """Any chain of integer operations on a counter of 1 to 300 elements gives the integers of eager mode."""

    def chain(steps, size):
        def run(k):
            x = torch.arange(size)
            for name, c in steps:
                x = STEPS[name](x, c)
            return x + k

        return run

    agree({i: chain(*p) for i, p in enumerate(programs)}, torch.tensor(7))


@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="a processor of x86-64")
def test_loops_of_shorter_vectors_take_no_longer_registers():
    """Where loops use vectors of AVX2 or no vectors, the compiler may not use AVX-512, whatever the processor has."""
    with _inductor.knowing():
        for isa in (cpu_vec_isa.VecAVX2(), cpu_vec_isa.invalid_vec_isa):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cpu_vec_isa, "pick_vec_isa", lambda isa=isa: isa)
                flags, _ = cpp_builder._get_optimization_cflags(cpp_builder.get_cpp_compiler())
            assert "fwrapv" in flags
            given = [f"-{f}" for f in flags if not f.startswith("march")]
            command = [cpp_builder.get_cpp_compiler(), "-march=sapphirerapids", *given, "-dM", "-E", "-x", "c++", "-"]
            macros = subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout
            assert "__AVX2__" in macros and "__AVX512" not in macros


def test_scalars_of_few_bits_stay_in_their_type():
    """Quotients and absolute values of i16 stay i16 in expressions with other dtypes, although C++ computes them as
    int."""
    x = torch.cat([torch.tensor([-(2**15)] * 3, dtype=torch.int16), torch.arange(-9, 9, dtype=torch.int16)])
    rows = torch.arange(50) % len(x)
    divided = lambda x: torch.div(x, -128, rounding_mode="trunc") // 31765
    functions = {
        "a quotient": lambda x, y: torch.remainder(torch.arange(50), divided(x)[rows].clamp(max=-2)),
        "an absolute value": lambda x, y: y.abs()[rows].clamp(max=5) < 0,
    }
    agree(functions, x, x.clone())
