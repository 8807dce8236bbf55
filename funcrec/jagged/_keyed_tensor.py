"""KeyedTensor: a vector for each example and key, in one tensor.

kt[k] = values[:, start_k : start_k + dims[k]],   values [B, ΣD]
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, overload

import torch
from torch import Tensor

from funcrec.core import (
    PARTS,
    Form,
    Movable,
    Problem,
    check,
    describe,
    fail,
    pytree,
    twice_problems,
    typed,
    unknown_problems,
)
from funcrec.jagged._lists import bag_list
from funcrec.jagged._primitives import are_equal, is_concrete


@pytree(static=("keys", "dims"))
class KeyedTensor(Movable):
    """Pooled features in one tensor, read like a dict: `kt["item"]` is [B, D].

    Args:
      values: f[B, ΣD], the columns of the features side by side.
      keys: the name of each feature.
      dims: the width of each feature.

    Example:
      >>> import torch, funcrec as fr
      >>> kt = fr.KeyedTensor.from_dict({"user": torch.zeros(2, 4), "item": torch.ones(2, 8)})
      >>> kt["item"].shape, kt
      (torch.Size([2, 8]), KeyedTensor(user: 4, item: 8, values=f32[2, 12]))
      >>> kt[:1]
      KeyedTensor(user: 4, item: 8, values=f32[1, 12])
    """

    values: Tensor
    keys: tuple[str, ...]
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        check("funcrec.KeyedTensor", column_problems(self.values, self.keys, self.dims))

    @staticmethod
    @typed
    def from_dict(features: Mapping[str, Annotated[Tensor, Form("[B, D, ...]")]]) -> "KeyedTensor":
        """Return a KeyedTensor that joins the features {key: [B, D]} -> [B, ΣD]."""
        if not features:
            hint = "{key: torch.zeros(num_bags, embedding_dim)}"
            fail("funcrec.KeyedTensor.from_dict", "`features` are none.", got="{}", need="{key: [B, D]}", hint=hint)
        check("funcrec.KeyedTensor.from_dict", feature_problems(features))
        dims = tuple(x.shape[-1] for x in features.values())
        return KeyedTensor(torch.cat(list(features.values()), -1), tuple(features), dims)

    @overload
    def __getitem__(self, which: str) -> Tensor: ...
    @overload
    def __getitem__(self, which: int | slice | Sequence[int]) -> "KeyedTensor": ...
    def __getitem__(self, which: str | int | slice | Sequence[int]) -> Any:
        """Return the columns of a key, a view [B, D]; for positions, return these bags of every key: `kt[2:5]`,
        `kt[3]`, `kt[[4, 0]]`."""
        if isinstance(which, (int, slice, list, tuple)):
            return self._bags(which)
        if not isinstance(which, str) or which not in self.keys:
            need = f"one of {list(self.keys)}"
            fail("funcrec.KeyedTensor", "the key does not exist.", got=f"{which!r}", need=need, kind=KeyError)
        f = self.keys.index(which)
        return self.values.narrow(-1, sum(self.dims[:f]), self.dims[f])

    def _bags(self, which: int | slice | Sequence[int]) -> "KeyedTensor":
        call = "funcrec.KeyedTensor.__getitem__"
        if self.values.dim() < 2:
            fail(call, "the value has no bags.", got=describe(self.values), need="values [B, ΣD]", kind=IndexError)
        if isinstance(which, slice) and which.step in (None, 1):
            return KeyedTensor(self.values[..., which, :], self.keys, self.dims)
        chosen = bag_list(which, self.values.shape[-2], call)
        return self.select(torch.tensor(chosen, dtype=torch.int64, device=self.values.device))

    @typed
    def select(self, bags: Annotated[Tensor, Form("i[K]")]) -> "KeyedTensor":
        """Return the bags i[K] of every key, in that order and with repeats, as a KeyedTensor [K, ΣD].

        Raises:
          IndexError: if a bag does not exist. The check reads `bags` if they are on the CPU.
        """
        num_bags = self.values.shape[-2] if self.values.dim() > 1 else 0
        if is_concrete(bags) and bags.numel() and not 0 <= int(bags.min()) <= int(bags.max()) < num_bags:
            got, need = f"{int(bags.min())} to {int(bags.max())}", f"0 <= bag < {num_bags}"
            fail("funcrec.KeyedTensor.select", "`bags` has a bag that does not exist.", got=got, need=need,
                 kind=IndexError)  # fmt: skip
        return KeyedTensor(self.values.index_select(-2, bags), self.keys, self.dims)

    def to_dict(self) -> dict[str, Tensor]:
        """Return the columns of each key, as views -> {key: [B, D]}."""
        return dict(zip(self.keys, self.values.split(self.dims, -1), strict=True))

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.to_dict().items())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def stack(self) -> Tensor:
        """Return the features as one tensor -> [B, F, D], which FM and dot interactions read. All dims must agree."""
        if len(set(self.dims)) > 1:
            got = f"dims {dict(zip(self.keys, self.dims, strict=True))}"
            fail("funcrec.KeyedTensor.stack", "the features differ in width.", got=got, need="one dim for all")
        return self.values.unflatten(-1, (len(self.keys), self.dims[0] if self.dims else 0))

    @staticmethod
    @typed
    def concat(parts: Sequence["KeyedTensor"], *, along: Literal["keys", "bags"] = "keys") -> "KeyedTensor":
        """Return a KeyedTensor with the keys of all parts, in order; or with the bags of all parts, which then have the
        same keys and dims.

        Law: concat([kt[:n], kt[n:]], along="bags") equals kt.
        """
        if along == "bags":
            check("funcrec.KeyedTensor.concat", bag_problems(parts))
            return KeyedTensor(torch.cat([x.values for x in parts], -2), parts[0].keys, parts[0].dims)
        found = twice_problems("a key stands in several parts.", (k for part in parts for k in part.keys))
        check("funcrec.KeyedTensor.concat", found)
        return KeyedTensor.from_dict({k: x for part in parts for k, x in part.items()})

    def __repr__(self) -> str:
        named = ", ".join(f"{k}: {d}" for k, d in zip(self.keys, self.dims, strict=True))
        return f"KeyedTensor({named}, values={describe(self.values)})"


@overload
def regroup(parts: Sequence[KeyedTensor], groups: Mapping[str, Sequence[str]]) -> dict[str, Tensor]: ...
@overload
def regroup(parts: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]: ...
@typed
def regroup(
    parts: Sequence[KeyedTensor], groups: Sequence[Sequence[str]] | Mapping[str, Sequence[str]]
) -> list[Tensor] | dict[str, Tensor]:
    """Return one tensor for each group, with the columns of the group's features from several KeyedTensors.

    A key may be in several groups.

    Returns:
      [B, W] for each group, where W is the sum of the dims of its features. Groups with names, {name: keys}, give
      {name: [B, W]}.

    Raises:
      KeyError: if no part has a key of a group.
      ValueError: if two parts have one key, or a group has no key.

    Source: TorchRec's `KeyedTensor.regroup` and `KTRegroupAsDict`.

    Example:
      >>> import torch, funcrec as fr
      >>> a = fr.KeyedTensor.from_dict({"x": torch.zeros(1, 2), "y": torch.ones(1, 1)})
      >>> [g.tolist() for g in fr.regroup([a], [["y", "x"], ["y"]])]
      [[[1.0, 0.0, 0.0]], [[1.0]]]
      >>> fr.regroup([a], {"deep": ["y"]})
      {'deep': tensor([[1.]])}
    """
    if isinstance(groups, Mapping):
        return dict(zip(groups, regroup(parts, list(groups.values())), strict=True))
    call, names = "funcrec.regroup", [k for part in parts for k in part.keys]
    check(
        call, twice_problems("a key stands in several parts.", names, "one part for each key", "each key in one part")
    )
    named = (k for group in groups for k in group)
    check(call, unknown_problems("`groups` names unknown keys.", named, names, kind=KeyError))
    empty = [i for i, group in enumerate(groups) if not group]
    if empty:
        fail(call, f"`groups{empty}` is empty.", got="no key", need="one or more keys in each group")
    features = {k: x for part in parts for k, x in part.items()}
    check(call, feature_problems(features))
    return [torch.cat([features[k] for k in group], -1) for group in groups]


def column_problems(values: object, keys: Sequence[str], dims: Sequence[int]) -> Iterator[Problem]:
    """Yield a problem unless each key has a dim, and the dims sum to the number of columns of the values."""
    yield from twice_problems("`keys` names a feature twice.", keys)
    if len(keys) != len(dims) or (isinstance(values, Tensor) and (values.dim() < 1 or values.shape[-1] != sum(dims))):
        got = f"dims {list(dims)} of {len(keys)} keys; values is {describe(values)}"
        yield Problem("`values` does not match its dims.", got, "values [B, sum(dims)], a dim for each key")


def feature_problems(features: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Yield a problem unless the features have one dtype, one device and one batch."""
    if len({x.dtype for x in features.values()}) > 1:
        got, hint = ", ".join(f"{k}: {describe(x)}" for k, x in features.items()), "x.float() for each of them"
        yield Problem("the features differ in dtype.", got, "one dtype for all", hint, TypeError)
    if len({x.device for x in features.values()}) > 1:
        got, need = ", ".join(f"{k}: {x.device}" for k, x in features.items()), "one device for all"
        yield Problem("the features are on different devices.", got, need, "x.to(device) for each of them")
    batches = {k: x.shape[:-1] for k, x in features.items()}
    if not are_equal(batches.values()):
        need = "one B for all"
        yield Problem("the features have different numbers of rows.", f"{batches}", need, "features of one batch")


def bag_problems(parts: Sequence[KeyedTensor]) -> Iterator[Problem]:
    """Yield a problem unless the parts have the same columns; only their numbers of bags may differ."""
    forms = {(x.keys, x.dims, x.values.dtype, x.values.device, x.values.dim(), *x.values.shape[:-2]) for x in parts}
    if len(forms) != 1 or any(x.values.dim() < 2 for x in parts):
        got, hint = ", ".join(map(repr, parts)) or "none", "the same features of several batches"
        yield Problem("`parts` differ in more than their bags.", got, "the same keys, dims and dtype", hint)


def keyed_tensor_parts(x: KeyedTensor, path: str) -> Iterator[Problem]:
    """Yield the problems of the fields of a KeyedTensor that code made by hand or took out of a tree."""
    hint = "KeyedTensor.from_dict({...})"
    if not isinstance(x.values, Tensor) or x.values.dim() < 1:
        yield Problem(f"`{path}.values` is not a tensor.", describe(x.values), "f[B, ΣD]", hint, TypeError)
    pairs = (("keys", x.keys, str, "names"), ("dims", x.dims, int, "widths"))
    for name, field, kind, words in pairs:
        if not isinstance(field, tuple) or not all(isinstance(e, kind) for e in field):
            got = f"{field!r}"
            yield Problem(f"`{path}.{name}` are not {words}.", got, f"a tuple of {words}", hint, TypeError)
            return
    if len(x.keys) != len(x.dims):
        got = f"{len(x.keys)} keys, {len(x.dims)} dims"
        yield Problem(f"`{path}.dims` do not match its keys.", got, "one width for each key", hint)


PARTS[KeyedTensor] = keyed_tensor_parts
