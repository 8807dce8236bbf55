"""Compare torch's operators, compiled and eager, on samples of torch itself (OpInfo): `make sanitize`, or

    PYTHONPATH=tests python -m programs.operators [--seconds 600] [--seed 0] [--only bmm,remainder]

The program tries every operator and dtype with up to three samples, in random order, forty cases per program of
`fr.jit`. Dtypes, shapes, integers and bools must be equal. Floats must be equal within a few roundings of their dtype.
funcrec's own error may refuse a program. Each difference is printed on a line. The exit status is 1 if a difference is
not in LEFT."""

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import funcrec as fr

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SAMPLES, ELEMENTS, IN_A_PROGRAM = 3, 4000, 40
# Skipped families: random results, results unique only up to a sign, no dense results, or minutes of compilation.
PASSED_BY = (
    "rand", "dropout", "bernoulli", "multinomial", "normal", "empty", "rrelu", "exponential", "cauchy", "geometric",
    "uniform", "sparse", "nested", "item", "nonzero", "unique", "masked_select", "stft", "fft", "linalg", "svd", "lu",
    "qr", "eig", "cholesky", "lobpcg", "resize", "set_", "conv", "attention", "jiterator", "lstsq", "ormqr", "pca",
    "inverse", "logdet", "matrix", "triangular", "tensor_split", "signal", "special", "torch.ops",
)  # fmt: skip
LEFT = {
    ("any", torch.uint8): "gives bools",
    ("all", torch.uint8): "gives bools",
    **{
        ("linspace.tensor_overload", d): "eager mode's product and sum are rounded once where the processor fuses them"
        for d in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    },
    **{
        (f"nn.functional.interpolate.{k}", torch.uint8): "eager mode's weights have 16 bits"
        for k in ("bilinear", "bicubic")
    },
    ("nn.functional.soft_margin_loss", torch.float16): "eager mode's sum is infinite",
    ("grid_sampler_2d", torch.bfloat16): "eager mode rounds places to 16 bits",
    ("grid_sampler_2d", torch.float16): "eager mode rounds places to 16 bits",
    ("nn.functional.grid_sample", torch.bfloat16): "eager mode rounds places to 16 bits",
    ("nn.functional.grid_sample", torch.float16): "eager mode rounds places to 16 bits",
}


class Case(NamedTuple):
    operator: str
    dtype: torch.dtype
    said: str
    f: Callable[[Sequence[Tensor]], list[Tensor]]
    inputs: list[Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of operators, with commas between")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin, count, pack = time.monotonic(), Counter(), []
    for case in cases(random.Random(asked.seed), set(filter(None, asked.only.split(",")))):
        pack.append(case)
        if len(pack) == IN_A_PROGRAM:
            check(pack, count)
            pack = []
        if time.monotonic() - begin > asked.seconds:
            break
    check(pack, count)
    print(f"operators: {dict(count)}, {time.monotonic() - begin:.0f} s")
    return int(count["wrong"] > 0)


def cases(rng: random.Random, only: set[str]) -> Iterator[Case]:
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = [o for o in op_db if (o.name in only if only else not any(k in o.name for k in PASSED_BY))]
    rng.shuffle(chosen)
    for o in chosen:
        for dtype in (d for d in DTYPES if d in o.supported_dtypes("cpu")):
            try:
                samples = list(o.sample_inputs("cpu", dtype, requires_grad=False))
            except Exception:  # the maker of torch's samples fails
                continue
            rng.shuffle(samples)
            yield from filter(None, (case_of(o, dtype, s) for s in samples[:SAMPLES]))


def case_of(o, dtype: torch.dtype, sample) -> Case | None:
    """Return the operator as a function of the sample's tensors. Return None if the tensors have unsupported kinds, or
    if eager mode refuses the call."""
    flat, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
    tensors = [flat[i] for i in at]
    plain = all(x.layout == torch.strided and not x.dtype.is_complex for x in tensors)
    if not tensors or not plain or sum(x.numel() for x in tensors) > ELEMENTS:
        return None

    def f(xs: Sequence[Tensor]) -> list[Tensor]:
        whole = list(flat)
        for i, x in zip(at, xs, strict=True):
            whole[i] = x
        first, args, kwargs = tree_unflatten(whole, structure)
        return [y for y in tree_flatten(o(first, *args, **kwargs))[0] if isinstance(y, Tensor)]

    try:
        f(copied(tensors))
    except Exception:  # any error, because the sample is for another device or is meant to fail
        return None
    name = ".".join(filter(None, (o.name, o.variant_test_name)))
    rest = [x for i, x in enumerate(flat) if i not in at][:6]
    return Case(name, dtype, f"{name} {dtype} {[tuple(x.shape) for x in tensors]} {rest}", f, copied(tensors))


def copied(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone() for x in xs]


def check(pack: list[Case], count: Counter) -> None:
    """Compare the cases as one program with eager mode. If the program raises, try its halves, down to the case that
    raises."""
    if not pack:
        return
    try:
        found = fr.jit(lambda inputs: [c.f(x) for c, x in zip(pack, inputs, strict=True)])([c.inputs for c in pack])
    except Exception as error:  # any error, because every error is reported
        if len(pack) > 1:
            check(pack[: len(pack) // 2], count)
            check(pack[len(pack) // 2 :], count)
        elif "funcrec.jit" in str(error):
            count["refused"] += 1
        else:
            count_outcome(pack[0], f"{type(error).__name__}: {error}", count)
        return
    for c, got in zip(pack, found, strict=True):
        if how := difference(got, c.f(copied(c.inputs))):
            count_outcome(c, how, count)
        else:
            count["equal"] += 1


def count_outcome(c: Case, how: str, count: Counter) -> None:
    left = LEFT.get((c.operator, c.dtype))
    count["left" if left else "wrong"] += 1
    if not left:
        print(f"{c.said}: {' '.join(how.split())[:300]}", flush=True)


def difference(got: list[Tensor], wanted: list[Tensor]) -> str:
    for x, y in zip(got, wanted, strict=True):
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return f"{x.dtype}{list(x.shape)} for {y.dtype}{list(y.shape)}"
        if y.dtype.is_complex:
            x, y = (torch.view_as_real(z.resolve_conj().resolve_neg()) for z in (x, y))
        try:
            close = CLOSE.get(y.dtype, 0.0)
            torch.testing.assert_close(x, y, rtol=close, atol=close, equal_nan=True)
        except AssertionError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
