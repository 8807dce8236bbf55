"""Checks of the parts of a KeyedJaggedTensor, which read metadata only."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.core import Problem, describe, doubled, element_problems, reported
from funcrec.jagged._checks import INT_DTYPES, bag_problems, buffer_problems, mapped_problems, offset_form_problems
from funcrec.jagged._jagged import JaggedTensor
from funcrec.jagged._primitives import are_equal

FIELDS = ("values", "offsets", "weights", "inverse", "keys", "strides", "unweighted")


def field_problems(fields: tuple, named: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for wrong fields of KeyedJaggedTensor: in TorchRec's order, with its names, or keys in a list."""
    given, unknown = dict(zip(FIELDS, fields, strict=False)) | dict(named), [k for k in named if k not in FIELDS]
    keys, no_tensors = given.get("keys", ()), [k for k in FIELDS[:4] if type(given.get(k)) in (list, tuple, str)]
    named_keys = isinstance(keys, tuple) and all(isinstance(k, str) for k in keys)
    if unknown or no_tensors or not named_keys or len(fields) > len(FIELDS):
        got = ", ".join(f"{k}: {describe(x)}" for k, x in given.items())
        hint = "KeyedJaggedTensor.from_lengths(keys, values, lengths), from_offsets, from_lists"
        need = "values, offsets, weights, inverse, keys=(a tuple of names), strides, unweighted"
        yield Problem("the fields are others.", got, need, f"{hint}; fr.interop.from_torchrec(kjt)", TypeError)


def keyed_problems(
    keys: tuple[str, ...], weights: object, unweighted: tuple[str, ...], num_bags: int, strides: tuple[int, ...] | None
) -> Iterator[Problem]:
    """Yield a problem unless the keys are distinct and have `num_bags` bags in all; some keys may have no weights."""
    yield from key_problems(keys)
    yield from unweighted_problems(keys, weights, unweighted)
    yield from stride_problems(keys, num_bags, strides)
    if not keys and num_bags and strides is None:
        yield Problem("there are bags of no key.", f"{num_bags} bags for 0 keys", "a name for each feature")


def key_problems(keys: Sequence[str]) -> Iterator[Problem]:
    if again := doubled(keys):
        hint = f"a name of its own for each {again[0]!r}"
        yield Problem("`keys` names a feature twice.", f"{again} more than once", "distinct keys", hint)


def stride_problems(keys: tuple[str, ...], num_lengths: int, strides: tuple[int, ...] | None) -> Iterator[Problem]:
    if strides is not None:
        if not isinstance(strides, tuple) or not all(type(s) is int for s in strides):
            need, hint = "a tuple of counts, one for each key", "strides=None, where all keys have one number of bags"
            yield Problem("`strides` are not counts.", describe(strides), need, hint, TypeError)
        elif len(strides) != len(keys) or any(s < 0 for s in strides):
            yield Problem("`strides` does not match the keys.", f"{strides}", f"{len(keys)} counts >= 0")
        elif sum(strides) != num_lengths:
            need = f"{sum(strides)} (the sum of strides {strides})"
            yield Problem("the number of bags does not match `strides`.", f"{num_lengths} bags", need)
    elif keys and num_lengths % len(keys):
        got, need = f"{num_lengths} bags for {len(keys)} keys", "F * B bags"
        yield Problem("the number of bags is not a multiple of the keys.", got, need, "strides=(...), if they differ")


def mapping_problems(x: object, name: str) -> Iterator[Problem]:
    if not isinstance(x, Mapping):
        hint = "{'clicked': fr.JaggedTensor.from_lists([[1, 2], []])}"
        yield Problem(f"`{name}` is not a mapping from keys.", describe(x), "{key: ...}", hint, TypeError)


def keyed_bag_problems(x: object, name: str) -> Iterator[Problem]:
    yield from mapping_problems(x, name)
    for k, bags in x.items() if isinstance(x, Mapping) else ():
        yield from bag_problems(bags, f"{name}[{k!r}]")


def same_key_problems(a: Mapping, b: Mapping, *, some: bool = False) -> Iterator[Problem]:
    """Yield a problem unless b has the keys of a, or with `some` a part of these keys, and bags of the same lengths."""
    if not isinstance(b, Mapping) or not (set(a) >= set(b) if some else set(a) == set(b)):
        got = f"{sorted(b)}" if isinstance(b, Mapping) else describe(b)
        yield Problem("the keys of the two arguments differ.", got, f"{'some of ' if some else ''}{sorted(a)}")
        return
    for k in b:
        shapes = [[len(bag) for bag in x[k]] if isinstance(x[k], Sequence) else None for x in (a, b)]
        if None not in shapes and shapes[0] != shapes[1]:
            hint = "a weight for each id"
            yield Problem(f"`weights[{k!r}]` has bags of other lengths.", f"{shapes[1]}", f"{shapes[0]}", hint)


def unweighted_problems(keys: object, weights: object, unweighted: object, path: str = "") -> Iterator[Problem]:
    """Yield the problems of `unweighted`, the keys without weights."""
    hint = "unweighted=(), where all keys have weights, or none has"
    if not isinstance(unweighted, tuple) or not all(isinstance(k, str) for k in unweighted):
        what = f"`{path}unweighted` are not names."
        yield Problem(what, describe(unweighted), "a tuple of strings", hint, TypeError)
    elif unweighted and weights is None:
        what = f"`{path}unweighted` names keys, and none has weights."
        yield Problem(what, f"{unweighted}; `weights` is None", "weights, or unweighted=()", hint)
    elif isinstance(keys, tuple) and not set(unweighted) <= set(keys):
        yield Problem(f"`{path}unweighted` names other keys.", f"{unweighted}", f"some of {list(keys)}", hint)


def keyed_parts(ids: Any, path: str) -> Iterator[Problem]:
    """Yield the problems of a KeyedJaggedTensor's fields."""
    if (yield from reported(mapped_problems(ids.values, path))):
        return
    yield from buffer_problems(ids.values, ids.weights, f"{path}.")
    found = yield from reported(
        offset_form_problems(ids.offsets, getattr(ids.values, "device", None), f"{path}.offsets")
    )
    if not isinstance(ids.keys, tuple):
        hint = f"tuple({path}.keys)" if isinstance(ids.keys, list) else "KeyedJaggedTensor.from_offsets(keys, ...)"
        yield Problem(f"`{path}.keys` are not names.", describe(ids.keys), "a tuple of strings", hint, TypeError)
    elif not found:
        yield from stride_problems(ids.keys, ids.offsets.shape[0] - 1, ids.strides)
    yield from unweighted_problems(ids.keys, ids.weights, ids.unweighted, f"{path}.")
    if ids.inverse is not None:
        yield from inverse_problems(ids, path)


def inverse_problems(ids: Any, path: str) -> Iterator[Problem]:
    inverse, hint = ids.inverse, "inverse=None, where all keys have one number of bags"
    if not isinstance(inverse, Tensor) or inverse.dtype not in INT_DTYPES or inverse.dim() != 2:
        yield Problem(f"`{path}.inverse` is not a matrix of bags.", describe(inverse), "i[F, E]", hint, TypeError)
    elif isinstance(ids.keys, tuple) and inverse.shape[0] != len(ids.keys):
        need = f"a row for each of {len(ids.keys)} keys"
        yield Problem(f"`{path}.inverse` does not match the keys.", describe(inverse), need, hint)
    elif isinstance(ids.offsets, Tensor) and inverse.device != ids.offsets.device:
        yield Problem(f"`{path}.inverse` is on another device.", f"{inverse.device}", f"device {ids.offsets.device}")


def inverse_value_problems(ids: Any, kind: type[Exception] = ValueError) -> Iterator[Problem]:
    """Yield a problem for inverse indices of bags that do not exist, which it reads on the host."""
    if ids.inverse is None:
        return
    for f, key in enumerate(ids.keys):
        count, own = ids.bags_of(key), ids.inverse[f]
        wrong = (own < 0) | (own >= count)
        what, name = f"`ids.inverse` names bags of {key!r} that do not exist.", f"inverse[{f}]"
        yield from element_problems(what, name, own, wrong, f"0 <= bag < {count}", kind=kind)


def keyed_hint(ids: object, path: str) -> str:
    """Return a hint that says how to make a KeyedJaggedTensor from the given value."""
    if type(ids).__name__ == "KeyedJaggedTensor":  # a value of TorchRec
        return f"fr.interop.from_torchrec({path})"
    if isinstance(ids, JaggedTensor):
        return f'fr.KeyedJaggedTensor.from_jagged({{"clicked": {path}}})'
    if isinstance(ids, Mapping) and ids and all(isinstance(x, JaggedTensor) for x in ids.values()):
        return f"fr.KeyedJaggedTensor.from_jagged({path})"
    if hasattr(ids, "ids"):
        return f"`{path}.ids`, the ids of a batch"
    return "KeyedJaggedTensor.from_lists({...}) or from_jagged({...})"


def buffer_form_problems(parts: Mapping[str, Any], what: str) -> Iterator[Problem]:
    """Yield a problem unless the values fit one buffer: one dtype, one device, rows of one shape."""
    got = ", ".join(f"{k}: {describe(x.values)}" for k, x in parts.items())
    if len({(x.values.dtype, x.values.device) for x in parts.values()}) > 1:
        yield Problem(f"{what} differ in dtype or device.", got, "one dtype on one device", kind=TypeError)
    elif not are_equal(x.values.shape[1:] for x in parts.values()):
        yield Problem(f"{what} have values of different shapes.", got, "one shape")


def concat_problems(parts: Sequence[Any]) -> Iterator[Problem]:
    yield from key_problems([k for p in parts for k in p.keys])
    yield from buffer_form_problems({f"parts[{i}]": p for i, p in enumerate(parts) if p.keys}, "the parts")
    bare = [i for i, p in enumerate(parts) if p.inverse is None]
    if 0 < len(bare) < len(parts):
        yield Problem("only some of `parts` have inverse indices.", f"none in parts {bare}", "all or none")
    shared = [p.inverse.shape[1] for p in parts if p.inverse is not None]
    counts = [p.num_bags for p in parts if p.keys and p.strides is None and p.inverse is None]
    if not are_equal(shared):
        yield Problem("`parts` have different numbers of examples.", f"{shared}", "one number of examples")
    elif not are_equal(counts):
        yield Problem("`parts` have different numbers of bags.", f"{counts}", "one number of bags")


def id_dtype_problems(values: Tensor, path: str) -> Iterator[Problem]:
    if isinstance(values, Tensor) and (values.dtype not in (torch.int32, torch.int64) or values.dim() != 1):
        got = describe(values)
        yield Problem(f"`{path}.values` are not ids.", got, "i32[N] or i64[N]", "values.long()", TypeError)
