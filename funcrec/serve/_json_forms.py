"""Checks of the form of every entry in JSON files. The messages have the words of kernels/serving/manifest.cpp."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from funcrec.core import Problem

MOST = 1 << 48  # the largest size of a file or a tensor
BRIEF = {
    "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "float16": "f16", "bfloat16": "bf16",
    "float32": "f32", "float64": "f64", "bool": "bool",
}  # fmt: skip
LENGTHS = ("B", "N", "F*B+1", "F*U+1")


class Whole(NamedTuple):
    """The form of whole numbers of 64 bits from `least` to `most`."""

    least: int
    most: int


class OrNull(NamedTuple):
    """A form that null has, and every value of the form `form`."""

    form: Any


DTYPE, LENGTH = "a dtype", "a length"
SPEC = {"name": str, "dtype": DTYPE, "shape": [LENGTH]}


def text_of(spec: Mapping) -> str:
    """Return the dtype and the shape as text: f32[B, 13]."""
    return f"{BRIEF[spec['dtype']]}[{', '.join(map(str, spec['shape']))}]"


# -- validators --------------------------------------------------------------------------------------------------


def wrong(at: str, got: str, need: str) -> Problem:
    return Problem(f"`{at}` is wrong.", got, need, "the file as funcrec wrote it")


def form_problems(at: str, x: Any, form: Any) -> Iterator[Problem]:
    """Yield a problem for the first entry that lacks its form.

    A form is str, a Whole, an OrNull, DTYPE, LENGTH, [form] or {key: form}."""
    if isinstance(form, OrNull):
        yield from form_problems(at, x, form.form) if x is not None else ()
    elif isinstance(form, dict):
        if not isinstance(x, dict):
            yield wrong(at, "no object", "an object")
            return
        inner = ((f"{at}.{k}", x[k], own) if k in x else k for k, own in form.items())
        yield from next(filter(None, ([*entry_problems(at, entry)] for entry in inner)), [])
    elif isinstance(form, list):
        if not isinstance(x, list):
            yield wrong(at, "no list", "a list")
            return
        found = ([*form_problems(f"{at}[{i}]", own, form[0])] for i, own in enumerate(x))
        yield from next(filter(None, found), [])
    elif form is bool:
        yield from () if isinstance(x, bool) else [wrong(at, "no bool", "true or false")]
    elif isinstance(form, Whole) or (form == LENGTH and not isinstance(x, str)):
        yield from number_problems(at, x, form if isinstance(form, Whole) else Whole(0, MOST))
    elif not isinstance(x, str):
        yield wrong(at, "no text", "text")
    elif form == DTYPE and x not in BRIEF:
        yield wrong(at, f'"{x}"', "a dtype that packages have")
    elif form == LENGTH and x not in LENGTHS:
        yield wrong(at, f'"{x}"', 'a number, "B", "N", "F*B+1" or "F*U+1"')


def entry_problems(at: str, entry: tuple | str) -> Iterator[Problem]:
    yield from form_problems(*entry) if isinstance(entry, tuple) else [missing(at, entry)]


def missing(at: str, key: str) -> Problem:
    return wrong(at, f'no "{key}"', "the file as it was written")


def number_problems(at: str, x: Any, form: Whole) -> Iterator[Problem]:
    if type(x) is not int or not -(1 << 63) <= x < 1 << 63:
        yield wrong(at, "no whole number of 64 bits", "one")
    elif not form.least <= x <= form.most:
        yield wrong(at, f"{x}", f"{form.least} to {form.most}")
