"""KeyedJaggedTensor: F features times B bags in one flat buffer, key-major.

    bag b of key f = values[offsets[f * B + b] : offsets[f * B + b + 1]]

TorchRec has the same layout. As in `JaggedTensor`, the tail is padding. Only `to_lists`, `unpad` and the constructors'
checks of CPU tensors read values on the host.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, overload

import torch
from torch import Tensor

from funcrec.core import PARTS, UNPADDED, Movable, Size, check, describe, fail, pytree, replace, typed
from funcrec.jagged._checks import capacity_problems, length_problems, offset_problems
from funcrec.jagged._jagged import Integers, JaggedTensor, Values, Weights, grow, take_ranges
from funcrec.jagged._join import as_part, join
from funcrec.jagged._keyed_checks import (
    buffer_form_problems,
    concat_problems,
    field_problems,
    id_dtype_problems,
    keyed_bag_problems,
    keyed_hint,
    keyed_parts,
    keyed_problems,
    same_key_problems,
)
from funcrec.jagged._lists import bag_list, flat_list, repeats, show_bags, show_buffer, split_list
from funcrec.jagged._primitives import are_equal, offsets_of
from funcrec.jagged._weights import flat_weights, given, read_alone


@pytree(static=("keys", "strides", "unweighted"), optional=("weights", "inverse"))
class KeyedJaggedTensor(Movable):
    """The ids of a batch.

    Args:
      values: [N], all bags of the first key, then all bags of each further key, then padding.
      offsets: i32|i64[F * B + 1], the boundaries of the bags, from 0. With `strides`, the size is sum(strides) + 1.
      weights: f[N], a multiplier per id, or None.
      inverse: i[F, E], the bag of each of E examples for each key, or None: example e has bag e. `lookup` needs
        `inverse` if the keys have different numbers of bags. `fr.dedup_bags` computes it.
      keys: the names of the F features.
      strides: the number of bags of each key if these numbers differ, else None.
      unweighted: the keys without weights, if other keys have weights. funcrec fills the places of these keys in
        `weights` with 1, as TorchRec does. Nothing reads these places: they cost an f32 per id, but no lookup time.

    Example:
      >>> import funcrec as fr
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], []], "user": [[7], [8]]})
      >>> ids["clicked"].to_lists(), ids[1:2].to_lists()
      ([[1, 2], []], {'clicked': [[]], 'user': [[8]]})
      >>> some = fr.KeyedJaggedTensor.from_lists(ids.to_lists(), weights={"clicked": [[0.5, 2.0], []]})
      >>> some["clicked"].unpad().weights, some["user"].weights
      (tensor([0.5000, 2.0000]), None)
      >>> {key: bags.num_bags for key, bags in ids.items()}, len(ids), "user" in ids
      ({'clicked': 2, 'user': 2}, 2, True)
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    inverse: Tensor | None = None
    keys: tuple[str, ...] = ()
    strides: tuple[int, ...] | None = None
    unweighted: tuple[str, ...] = ()
    part = None  # not a field: `as_part` sets it to a record of the value from which this value was taken

    def __new__(cls, *fields: object, **named: object) -> "KeyedJaggedTensor":
        check("funcrec.KeyedJaggedTensor", field_problems(fields, named))
        return object.__new__(cls)

    # -- constructors ------------------------------------------------------------------------------------------

    @staticmethod
    def from_lists(
        lists: Mapping[str, Sequence[Sequence[Any]]], *, weights: Any = None, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """Return ids from `{"clicked": [[1, 2], []]}`, and weights of the same form for all keys or some of them.
        A bag may be a list, a NumPy array or a tensor. `JaggedTensor.from_lists` says which dtypes the ids get."""
        call = "funcrec.KeyedJaggedTensor.from_lists"
        check(call, keyed_bag_problems(lists, "lists"))
        if (weights := given(weights)) is not None:
            check(call, keyed_bag_problems(weights, "weights"))
            check(call, same_key_problems(lists, weights, some=True))
        keys = tuple(lists)
        values, lengths = flat_list(call, (bag for k in keys for bag in lists[k]), "lists", dtype)
        counts = tuple(len(lists[k]) for k in keys)
        strides = None if are_equal(counts) else counts
        flat = flat_weights(call, lists, weights) if weights else None
        bare = tuple(k for k in keys if k not in weights) if weights else ()
        return KeyedJaggedTensor.from_lengths(keys, values, lengths, weights=flat, strides=strides, unweighted=bare)

    @staticmethod
    @typed
    def from_lengths(
        keys: Sequence[str],
        values: Values,
        lengths: Integers,
        *,
        weights: Weights | None = None,
        strides: Sequence[Size] | None = None,
        unweighted: Sequence[str] = (),
    ) -> "KeyedJaggedTensor":
        """Return ids from values [N] and lengths i[F * B] that sum to N."""
        keys, strides = tuple(keys), None if strides is None else tuple(strides)
        found = keyed_problems(keys, weights, tuple(unweighted), lengths.shape[0], strides)
        check("funcrec.KeyedJaggedTensor.from_lengths", found, length_problems(values, lengths))
        bare = tuple(k for k in keys if k in unweighted)
        return KeyedJaggedTensor(values, offsets_of(lengths), weights, None, keys, strides, bare)

    @staticmethod
    @typed
    def from_offsets(
        keys: Sequence[str],
        values: Values,
        offsets: Integers,
        *,
        weights: Weights | None = None,
        strides: Sequence[Size] | None = None,
        unweighted: Sequence[str] = (),
    ) -> "KeyedJaggedTensor":
        """Return ids from values [N] and offsets i[F * B + 1]; values from position offsets[-1] <= N on are padding."""
        keys, strides = tuple(keys), None if strides is None else tuple(strides)
        found = keyed_problems(keys, weights, tuple(unweighted), offsets.shape[0] - 1, strides)
        check("funcrec.KeyedJaggedTensor.from_offsets", found, offset_problems(values, offsets))
        bare = tuple(k for k in keys if k in unweighted)
        return KeyedJaggedTensor(values, offsets, weights, None, keys, strides, bare)

    @staticmethod
    @typed
    def from_jagged(features: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """Return ids from a JaggedTensor for each key, joined in one buffer. Some of the features may have no weights.
        The capacity is the sum of the features' capacities, but features from one buffer share its capacity.

        Law: `from_jagged(ids.to_dict())` has the bags and the capacity of `ids`.
        """
        check("funcrec.KeyedJaggedTensor.from_jagged", buffer_form_problems(features, "the features"))
        bare = [(k,) if x.weights is None else () for k, x in features.items()]
        return _joined(tuple(features), list(features.values()), tuple(x.num_bags for x in features.values()), bare)

    @staticmethod
    @typed
    def from_padded(
        padded: Mapping[str, Tensor], lengths: Mapping[str, Tensor], *, weights: Mapping[str, Tensor] | None = None
    ) -> "KeyedJaggedTensor":
        """Return ids from padded {key: [B, L]} and lengths {key: i[B]}. weights: {key: f[B, L]}, all keys or some.
        The capacity is the sum of B * L over the keys."""
        call = "funcrec.KeyedJaggedTensor.from_padded"
        own = given(weights or {})
        check(call, same_key_problems(padded, lengths), same_key_problems(padded, own, some=True))
        part = lambda k: JaggedTensor.from_padded(padded[k], lengths[k], weights=own.get(k))
        return KeyedJaggedTensor.from_jagged({k: part(k) for k in padded})

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def num_bags(self) -> int:
        """Return B, the number of bags of every key. Raise ValueError if `strides` is given."""
        if self.strides is not None:
            what, need, hint = "the keys have different numbers of bags.", "one number of bags", "ids.bags_of(key)"
            fail("funcrec.KeyedJaggedTensor.num_bags", what, got=f"strides={self.strides}", need=need, hint=hint)
        return (self.offsets.shape[0] - 1) // max(len(self.keys), 1)

    @property
    def num_examples(self) -> int:
        """Return E, the number of examples: the columns of `inverse`, or B."""
        return self.num_bags if self.inverse is None else self.inverse.shape[1]

    @property
    def capacity(self) -> int:
        """Return the length of the buffer, including padding."""
        return self.values.shape[0]

    @property
    def lengths(self) -> Tensor:
        """Return the length of each bag, key-major -> i[F * B]."""
        return self.offsets.diff()

    @property
    def _counts(self) -> tuple[int, ...]:
        """Return the number of bags of each key."""
        return (self.num_bags,) * len(self.keys) if self.strides is None else self.strides

    def bag_range(self, key: str) -> tuple[int, int]:
        """Return (first, last), so that offsets[first : last + 1] are the boundaries of the bags of `key`."""
        f = self._position(key)
        if self.strides is None:
            return f * (bags := self.num_bags), (f + 1) * bags
        return sum(self.strides[:f]), sum(self.strides[: f + 1])

    def bags_of(self, key: str) -> int:
        """Return the number of bags of `key`."""
        first, last = self.bag_range(key)
        return last - first

    def offsets_for(self, key: str) -> Tensor:
        """Return the boundaries of `key`'s bags in the flat buffer, which need not begin at 0 -> i[B + 1]."""
        first, last = self.bag_range(key)
        return self.offsets[first : last + 1]

    @property
    def offset_per_key(self) -> Tensor:
        """Return the place in the buffer where each key's values begin, and where the last key's end -> i[F + 1]."""
        at = torch.tensor([0, *accumulate(self._counts)], device=self.offsets.device)
        return self.offsets.index_select(0, at)

    @property
    def length_per_key(self) -> Tensor:
        """Return the number of values of each key -> i[F]."""
        return self.offset_per_key.diff()

    def to_lists(self) -> dict[str, list[list[Any]]]:
        """Return the bags of each key as lists, read on the host."""
        bags = split_list(self.values, self.offsets)
        return {k: bags[slice(*self.bag_range(k))] for k in self.keys}

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Return {key: its bags}, each in a buffer of the same capacity."""
        return {k: self[k] for k in self.keys}

    @overload
    def __getitem__(self, which: str) -> JaggedTensor: ...
    @overload
    def __getitem__(self, which: int | slice | Sequence[int]) -> "KeyedJaggedTensor": ...
    def __getitem__(self, which: str | int | slice | Sequence[int]) -> Any:
        """Return one feature's JaggedTensor for a key, `ids["clicked"]`; for positions, return these bags of every key:
        `ids[2:5]`, `ids[3]`, `ids[[4, 0]]`. With `inverse`, positions are examples, and all distinct bags stay."""
        if isinstance(which, str):
            positions = [self._position(which)]
            return as_part(self._take_keys(positions, self.capacity), self, positions)
        chosen = bag_list(which, self.num_examples, "funcrec.KeyedJaggedTensor.__getitem__")
        if self.inverse is not None:
            examples = torch.tensor(chosen, dtype=torch.int64, device=self.inverse.device)
            return replace(self, inverse=self.inverse.index_select(1, examples))
        if not self.keys:
            return replace(self, offsets=self.offsets.new_zeros(len(chosen) + 1))
        firsts = torch.arange(len(self.keys), device=self.offsets.device) * self.num_bags
        bags = firsts[:, None] + torch.tensor(chosen, dtype=torch.int64, device=self.offsets.device)
        return self._take_bags(bags.flatten(), repeats(chosen), self.keys)

    def _position(self, key: str) -> int:
        if not isinstance(key, str) or key not in self.keys:
            need = f"one of {list(self.keys)}"
            fail("funcrec.KeyedJaggedTensor", "the key does not exist.", got=f"{key!r}", need=need, kind=KeyError)
        return self.keys.index(key)

    def _take_bags(self, bags: Tensor, most: int, keys: tuple[str, ...], strides=None) -> "KeyedJaggedTensor":
        """Return the bags at these positions of the flat buffer, each at most `most` times, as the bags of `keys`."""
        starts, lengths = self.offsets[:-1].index_select(0, bags), self.lengths.index_select(0, bags)
        taken = take_ranges(self.values, self.weights, starts, lengths, self.capacity * most)
        return KeyedJaggedTensor(taken.values, taken.offsets, taken.weights, None, keys, strides, self.unweighted)

    def _take_keys(self, positions: Sequence[int], capacity: int) -> JaggedTensor:
        """Return the bags of these keys. The values of consecutive keys form one range, so one copy takes them."""
        runs: list[list[int]] = []
        for p in positions:
            if runs and runs[-1][1] == p:
                runs[-1][1] += 1
            else:
                runs.append([p, p + 1])
        counts, weights = self._counts, self._weights_of(positions)
        ends = [0, *accumulate(counts)]
        if len(runs) == 1:
            first, last = (ends[p] for p in runs[0])
            own = self.offsets[first : last + 1]
            starts = own[:1]
            taken = take_ranges(self.values, weights, starts, own[-1:] - starts, capacity)
            return JaggedTensor(taken.values, own - starts, taken.weights)
        bounds = [self.offsets.narrow(0, n, 1) for n in ends]
        lengths = self.lengths.split(counts) if counts else ()
        at = lambda keys: torch.cat([bounds[p] for p in keys] or [self.offsets[:0]])
        starts = at(first for first, _ in runs)
        taken = take_ranges(self.values, weights, starts, at(last for _, last in runs) - starts, capacity)
        none = self.offsets.new_zeros(self.num_bags if self.strides is None else 0)  # B + 1 zeros if no key is left
        own = torch.cat([lengths[p] for p in positions] or [none])
        return JaggedTensor(taken.values, offsets_of(own), taken.weights)

    def _weights_of(self, positions: Sequence[int]) -> Tensor | None:
        """Return the weights if one of these keys has weights, or if there is no key; else None."""
        is_bare = positions and all(self.keys[p] in self.unweighted for p in positions)
        return None if is_bare else self.weights

    def items(self) -> Iterator[tuple[str, JaggedTensor]]:
        """Yield (key, its bags), as a dict does. `for key in ids`, `key in ids` and `len(ids)` work as in a dict."""
        return iter(self.to_dict().items())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    # -- keys --------------------------------------------------------------------------------------------------

    @typed
    def permute(self, keys: Sequence[str | int]) -> "KeyedJaggedTensor":
        """Return the ids with keys in another order. `keys` may leave out or repeat a key, and has names or positions.
        A name means its first place.

        Example:
          >>> import funcrec as fr
          >>> ids = fr.KeyedJaggedTensor.from_lists({"a": [[1]], "b": [[2, 3]]})
          >>> ids.permute(["b"]).to_lists()
          {'b': [[2, 3]]}
        """
        beyond = [k for k in keys if isinstance(k, int) and (isinstance(k, bool) or not 0 <= k < len(self.keys))]
        if beyond:
            what, need = "`keys` are not positions of keys.", f"0 to {len(self.keys) - 1}"
            fail("funcrec.KeyedJaggedTensor.permute", what, got=f"{beyond}", need=need, kind=IndexError)
        positions = [k if isinstance(k, int) else self._position(k) for k in keys]
        out = self._take_keys(positions, self.capacity * repeats(positions))
        strides = None if self.strides is None else tuple(self.strides[p] for p in positions)
        inverse = self.inverse
        if inverse is not None:
            inverse = inverse.index_select(0, torch.tensor(positions, dtype=torch.int64, device=inverse.device))
        names = tuple(self.keys[p] for p in positions)
        bare = () if out.weights is None else tuple(k for k in dict.fromkeys(names) if k in self.unweighted)
        taken = KeyedJaggedTensor(out.values, out.offsets, out.weights, inverse, names, strides, bare)
        return as_part(taken, self, positions)

    @typed
    def split(self, segments: Sequence[Size]) -> list["KeyedJaggedTensor"]:
        """Return one value for each segment, with the next `segments[i]` keys; the segments sum to F."""
        if sum(segments) != len(self.keys):
            call, need = "funcrec.KeyedJaggedTensor.split", f"counts that sum to {len(self.keys)}"
            hint = f"segments=[1] * {len(self.keys)}, for a part of each key"
            fail(call, "`segments` do not add up to the number of keys.", got=f"{list(segments)}", need=need, hint=hint)
        ends = list(accumulate(segments))
        return [self.permute(range(e - s, e)) for s, e in zip(segments, ends, strict=True)]

    @staticmethod
    @typed
    def concat(parts: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Return ids with the keys of all parts, in order. Capacities add up; parts of one value share one capacity.

        Law: `concat(ids.split(segments))` has the bags and the capacity of `ids`.
        """
        check("funcrec.KeyedJaggedTensor.concat", concat_problems(parts))
        counts = tuple(n for part in parts for n in part._counts)
        inverses = [part.inverse for part in parts if part.inverse is not None]
        inverse = torch.cat(inverses) if inverses else None
        parts = [p for p in parts if p.keys] or parts[:1]
        bare = [p.keys if p.weights is None else p.unweighted for p in parts]
        return _joined(tuple(k for p in parts for k in p.keys), parts, counts, bare, inverse)

    # -- padding and movement ----------------------------------------------------------------------------------

    @typed
    def pad_to(self, capacity: Size) -> "KeyedJaggedTensor":
        """Return the ids in a buffer of exactly `capacity` >= N ids; the new ids are zero."""
        check("funcrec.KeyedJaggedTensor.pad_to", capacity_problems(capacity, self.capacity))
        weights = None if self.weights is None else grow(self.weights, capacity)
        return self._with_buffer(grow(self.values, capacity), weights)

    def unpad(self) -> "KeyedJaggedTensor":
        """Return the ids without the padding; `unpad` reads offsets[-1] on the host."""
        end = int(self.offsets[-1])
        return self._with_buffer(self.values[:end], None if self.weights is None else self.weights[:end])

    def _with_buffer(self, values: Tensor, weights: Tensor | None) -> "KeyedJaggedTensor":
        return KeyedJaggedTensor(values, self.offsets, weights, self.inverse, self.keys, self.strides, self.unweighted)

    def __repr__(self) -> str:
        shown = ", ".join(f"{k!r}: {show_bags(self.values, self.offsets_for(k))}" for k in self.keys[:8])
        more = f", ... {len(self.keys)} keys" if len(self.keys) > 8 else ""
        bare = f", unweighted={list(self.unweighted)}" if self.unweighted else ""
        return f"KeyedJaggedTensor({{{shown}{more}}}, {show_buffer(self)}{bare})"


def _joined(keys: tuple, parts: Sequence, counts: tuple, bare: Sequence[tuple], inverse: Tensor | None = None):
    """Return the bags of `parts`, joined in one buffer, as the bags of `keys`.
    counts: the number of bags of each key. bare: the keys without weights in each part."""
    if not parts:
        return KeyedJaggedTensor(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    strides = None if are_equal(counts) else counts
    values, offsets, weights = join(parts)
    unweighted = () if weights is None else tuple(k for own in bare for k in own)
    return KeyedJaggedTensor(values, offsets, weights, inverse, keys, strides, unweighted)


# -- validators --------------------------------------------------------------------------------------------------


def check_ids(call: str, ids: object, path: str = "ids") -> None:
    """Raise unless `ids` is a KeyedJaggedTensor with a correct structure, even if code made it by hand."""
    if not isinstance(ids, KeyedJaggedTensor):
        what, need = f"`{path}` is not a KeyedJaggedTensor.", "a funcrec.KeyedJaggedTensor"
        fail(call, what, got=describe(ids), need=need, hint=keyed_hint(ids, path), kind=TypeError)
    check(call, keyed_parts(ids, path), id_dtype_problems(ids.values, path))


PARTS[KeyedJaggedTensor] = keyed_parts
UNPADDED[KeyedJaggedTensor] = read_alone
