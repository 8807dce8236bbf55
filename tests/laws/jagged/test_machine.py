"""Any sequence of operations on KeyedJaggedTensors and JaggedTensors equals the same on plain lists."""

import os
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule, run_state_machine_as_test
from programs import keyed_lists as lists
from programs.keyed_lists import Column, Lists

import funcrec as fr
from funcrec.jagged._buckets import bucket
from funcrec.testing import garbage_padding
from funcrec.testing import strategies as frs

KEYS = ("a", "b", "c", "d", "e")
SEEDS = st.integers(0, 2**16)


def content(bags: fr.JaggedTensor) -> Column:
    """Return what a JaggedTensor holds, bag by bag."""
    bounds = bags.offsets.tolist()
    cut = lambda x: None if x is None else [x[a:b].tolist() for a, b in pairwise(bounds)]
    return Column(cut(bags.values), cut(bags.weights))


def held(ids: fr.KeyedJaggedTensor) -> Lists:
    """Return what a KeyedJaggedTensor holds, key by key, read from its fields alone."""
    values, bounds, columns, at = ids.values.tolist(), ids.offsets.tolist(), [], 0
    count = (len(bounds) - 1) // max(len(ids.keys), 1)
    for key, n in zip(ids.keys, ids.strides or [count] * len(ids.keys), strict=True):
        cut = lambda x, at=at, n=n: [x[bounds[b] : bounds[b + 1]] for b in range(at, at + n)]
        bare = ids.weights is None or key in ids.unweighted
        columns.append(Column(cut(values), None if bare else cut(ids.weights.tolist())))
        at += n
    ragged, inverse = ids.strides is not None, None if ids.inverse is None else ids.inverse.tolist()
    examples = 0 if ragged else count if not ids.keys else 0
    return Lists(ids.keys, columns, ragged, inverse, examples if inverse is None else ids.inverse.shape[1])


def agree(ids: fr.KeyedJaggedTensor, x: Lists) -> None:
    """Assert that the ids hold x, and that every property that reads them says so."""
    own = held(ids)
    assert own._replace(examples=0) == x._replace(examples=0)
    if x.inverse is not None or not x.keys:
        assert own.examples == x.examples
    sizes = [len(bag) for c in x.columns for bag in c.bags]
    assert ids.lengths.tolist() == (sizes if x.keys else [0] * (ids.offsets.shape[0] - 1))
    assert ids.length_per_key.tolist() == [sum(map(len, c.bags)) for c in x.columns]
    assert ids.offset_per_key[-1:].tolist() == [x.size]
    firsts = {k: x.columns[x.keys.index(k)] for k in x.keys}
    assert ids.to_lists() == {k: c.bags for k, c in firsts.items()} and list(ids) == list(x.keys)
    assert {k: ids.bags_of(k) for k in x.keys} == {k: len(c.bags) for k, c in firsts.items()}
    assert all(ids.offsets_for(k).diff().tolist() == [len(b) for b in c.bags] for k, c in firsts.items())
    assert set(ids.unweighted) <= set(ids.keys) and (ids.weights is not None or not ids.unweighted)


def is_refused(parts: list[Lists], values: list[fr.KeyedJaggedTensor]) -> bool:
    """Return whether concat must refuse the parts: another dtype, a key twice, or other examples."""
    keys = [k for p in parts for k in p.keys]
    counts = [len(p.columns[0].bags) for p in parts if p.keys and not p.ragged and p.inverse is None]
    shared = [p.examples for p in parts if p.inverse is not None]
    return (
        len({v.values.dtype for v in values if v.keys}) > 1
        or len(set(keys)) < len(keys)
        or 0 < len(shared) < len(parts)
        or max(len(set(shared)), len(set(counts))) > 1
    )


class Machine(RuleBasedStateMachine):
    """Values beside their lists. A rule takes values that earlier rules made."""

    ids, bags = Bundle("ids"), Bundle("bags")

    def __init__(self):
        super().__init__()
        self.made = []

    def keep(self, value, x: Lists):
        """Compare the value with its lists, and keep both if they are small."""
        agree(value, x)
        self.made.append((value, x))
        return multiple((value, x)) if x.size < 60 and value.capacity < 400 and len(x.keys) < 6 else multiple()

    def keep_bags(self, value, x: Column):
        assert content(value) == x and value.num_bags == len(value) == len(x.bags)
        return multiple((value, x)) if value.capacity < 400 else multiple()

    def teardown(self):
        """No operation wrote to its arguments."""
        for value, x in self.made:
            agree(value, x)

    # -- constructors ------------------------------------------------------------------------------------------

    @initialize(target=ids, it=frs.keyed_jagged_tensors(min_bags=1))
    def first(self, it):
        return self.keep(it, held(it))

    @rule(target=ids, it=st.booleans().flatmap(lambda same: frs.keyed_jagged_tensors(same_bags=same)))
    def drawn(self, it):
        return self.keep(it, held(it))

    @rule(target=ids, pair=ids)
    def from_lists(self, pair):
        x = lists.take_keys(pair[1], [pair[1].keys.index(k) for k in dict.fromkeys(pair[1].keys)])
        weights = {k: c.weights for k, c in zip(x.keys, x.columns, strict=True)}
        bags = {k: c.bags for k, c in zip(x.keys, x.columns, strict=True)}
        made = fr.KeyedJaggedTensor.from_lists(bags, weights=weights, dtype=pair[0].values.dtype)
        return self.keep(made, x._replace(inverse=None, ragged=len(set(x.counts)) > 1, examples=0))

    @rule(target=ids, pair=ids, seed=SEEDS)
    def with_weights(self, pair, seed):
        """From lengths or offsets, with weights of some keys."""
        old, x = pair
        if len(set(x.keys)) < len(x.keys) or not x.keys:
            return multiple()
        of_lengths, tight = seed % 2, old.unpad()
        numbers = torch.randint(-8, 9, (tight.capacity,), generator=torch.Generator().manual_seed(seed)) / 4
        bare = tuple(k for i, k in enumerate(x.keys) if seed >> (i + 1) & 1)
        how = {"weights": numbers, "strides": tuple(x.counts) if x.ragged else None, "unweighted": bare}
        make = fr.KeyedJaggedTensor.from_lengths if of_lengths else fr.KeyedJaggedTensor.from_offsets
        made = make(x.keys, tight.values, tight.lengths if of_lengths else tight.offsets, **how)
        flat, columns = iter(numbers.tolist()), []
        for k, c in zip(x.keys, x.columns, strict=True):
            own = [[next(flat) for _ in bag] for bag in c.bags]
            columns.append(Column(c.bags, None if k in bare else own))
        return self.keep(made, x._replace(columns=columns, inverse=None))

    @rule(target=ids, pair=ids, more=st.integers(0, 2))
    def from_padded(self, pair, more):
        x = lists.take_keys(pair[1], [pair[1].keys.index(k) for k in dict.fromkeys(pair[1].keys)])
        length = max([0, *(len(bag) for c in x.columns for bag in c.bags)]) + more
        parts = {k: pair[0][k] for k in x.keys}
        scale = {k: fr.JaggedTensor(p.weights, p.offsets).to_padded(length) for k, p in parts.items()
                 if p.weights is not None}  # fmt: skip
        padded, lengths = {k: p.to_padded(length) for k, p in parts.items()}, {k: p.lengths for k, p in parts.items()}
        made = fr.KeyedJaggedTensor.from_padded(padded, lengths, weights=scale)
        return self.keep(made, x._replace(inverse=None, ragged=len(set(x.counts)) > 1, examples=0))

    @rule(target=ids, parts=st.lists(bags, max_size=3))
    def from_jagged(self, parts):
        named, columns = dict(zip(KEYS, [p for p, _ in parts], strict=False)), [c for _, c in parts]
        if len({p.values.dtype for p, _ in parts}) > 1:
            with pytest.raises(TypeError, match="differ in dtype"):
                fr.KeyedJaggedTensor.from_jagged(named)
            return multiple()
        x = Lists(KEYS[: len(parts)], columns, len({len(c.bags) for c in columns}) > 1)
        return self.keep(fr.KeyedJaggedTensor.from_jagged(named), x)

    # -- keys --------------------------------------------------------------------------------------------------

    @rule(target=ids, pair=ids, data=st.data())
    def permute(self, pair, data):
        value, x = pair
        places = st.integers(0, len(x.keys) - 1).map(lambda p: (p, p)) if x.keys else st.nothing()
        names = st.sampled_from(x.keys).map(lambda k: (k, x.keys.index(k))) if x.keys else st.nothing()
        chosen = data.draw(st.lists(st.one_of(names, places), max_size=4) if x.keys else st.just([]))
        return self.keep(value.permute([k for k, _ in chosen]), lists.take_keys(x, [p for _, p in chosen]))

    @rule(target=ids, pair=ids, data=st.data())
    def split(self, pair, data):
        value, x = pair
        ends = sorted(data.draw(st.lists(st.integers(0, len(x.keys)), max_size=2)))
        bounds = [0, *ends, len(x.keys)]
        parts = value.split([b - a for a, b in pairwise(bounds)])
        own = [lists.take_keys(x, range(a, b)) for a, b in pairwise(bounds)]
        if len(set(x.keys)) == len(x.keys):
            whole = fr.KeyedJaggedTensor.concat(parts)
            agree(whole, lists.concat(own))
            assert whole.capacity <= value.capacity  # less for a part whose source has less room
        for part, of in zip(parts, own, strict=True):
            self.keep(part, of)
        return multiple(*zip(parts, own, strict=True))

    @rule(target=ids, pairs=st.lists(ids, max_size=3))
    def concat(self, pairs):
        values, parts = [v for v, _ in pairs], [x for _, x in pairs]
        if is_refused(parts, values):
            with pytest.raises((TypeError, ValueError), match=r"differ|twice|inverse|numbers of"):
                fr.KeyedJaggedTensor.concat(values)
            return multiple()
        x = lists.concat(parts) if parts else Lists((), [])
        return self.keep(fr.KeyedJaggedTensor.concat(values), x)

    # -- bags --------------------------------------------------------------------------------------------------

    @rule(target=ids, pair=ids, data=st.data())
    def index(self, pair, data):
        value, x = pair
        if x.ragged and x.inverse is None:
            with pytest.raises(ValueError, match="different numbers of bags"):
                value[0:1]
            return multiple()
        n = x.num_examples
        place = st.integers(-n, n - 1) if n else st.nothing()
        which = data.draw(st.one_of(place, st.lists(place, max_size=4) if n else st.just([]), st.slices(n)))
        chosen = [which] if isinstance(which, int) else list(range(n))[which] if isinstance(which, slice) else which
        return self.keep(value[which], lists.take_examples(x, [c % n for c in chosen]))

    @rule(target=bags, pair=ids, data=st.data())
    def feature(self, pair, data):
        value, x = pair
        if not x.keys:
            return multiple()
        key = data.draw(st.sampled_from(x.keys))
        assert key in value and dict(value.items())[key].to_lists() == value[key].to_lists()
        return self.keep_bags(value[key], x.columns[x.keys.index(key)])

    @rule(target=bags, pair=bags, data=st.data())
    def select(self, pair, data):
        value, c = pair
        n = len(c.bags)
        at = data.draw(st.lists(st.integers(-n, n - 1), max_size=4)) if n else []
        taken = c.at([p % n for p in at])
        room = sum(map(len, taken.bags)) + data.draw(st.integers(0, 2))
        positions = torch.tensor([p % n for p in at], dtype=torch.int64)
        self.keep_bags(value[at], taken)
        return self.keep_bags(value.select(positions, capacity=room), taken)

    @rule(target=bags, pair=bags, length=st.integers(0, 5))
    def padded(self, pair, length):
        """Bags that are padded, and cut, to a length, and back."""
        value, c = pair
        cut = c.each(lambda bags: [bag[:length] for bag in bags])
        padded = value.to_padded(length, fill=-1)
        assert padded.tolist() == [bag + [-1] * (length - len(bag)) for bag in cut.bags]
        weights = None if c.weights is None else fr.JaggedTensor(value.weights, value.offsets).to_padded(length)
        made = fr.JaggedTensor.from_padded(padded, value.lengths.clamp(max=length), weights=weights)
        again = fr.JaggedTensor.from_lists(cut.bags, weights=cut.weights, dtype=value.values.dtype)
        assert content(again) == cut and [t.tolist() for t in value.to_tensors()] == c.bags
        return self.keep_bags(made, cut)

    @rule(pair=bags)
    def reduce(self, pair):
        value, c = pair
        plain = fr.JaggedTensor(value.values, value.offsets)
        assert fr.bag_reduce(plain, "sum").tolist() == [sum(bag) for bag in c.bags]
        full = [b for b, bag in enumerate(c.bags) if bag]
        assert fr.bag_reduce(plain, "max")[full].tolist() == [max(c.bags[b]) for b in full]

    # -- values ------------------------------------------------------------------------------------------------

    @rule(target=ids, pair=ids, seed=SEEDS)
    def bag_filter(self, pair, seed):
        value, x = pair
        mask = torch.rand(value.capacity, generator=torch.Generator().manual_seed(seed)) < (seed % 5) / 4
        kept = lists.keep(x, lambda place, f, v: bool(mask[place]))
        return self.keep(fr.bag_filter(value, mask), kept)

    @rule(target=ids, pair=ids, number=st.integers(0, 9), data=st.data())
    def drop_ids(self, pair, number, data):
        value, x = pair
        some = data.draw(st.dictionaries(st.sampled_from(x.keys), st.integers(0, 9))) if x.keys else {}
        self.keep(fr.drop_ids(value, some), lists.keep(x, lambda place, f, v: some.get(x.keys[f]) != v))
        return self.keep(fr.drop_ids(value, number), lists.keep(x, lambda place, f, v: v != number))

    @rule(target=ids, pair=ids, num_parts=st.integers(1, 3), data=st.data())
    def dedup(self, pair, num_parts, data):
        value, x = pair
        chosen = data.draw(st.none() | st.lists(st.sampled_from(x.keys), unique=True)) if x.keys else None
        doubled = len(set(x.keys)) < len(x.keys)
        if doubled or (x.ragged and x.inverse is None) or x.num_examples % num_parts:
            with pytest.raises((ValueError, KeyError), match=r"twice|different numbers of bags|not cut evenly"):
                fr.dedup_bags(value, chosen, num_parts=num_parts)
            return multiple()
        once = lists.dedup(x, x.keys if chosen is None else chosen, num_parts)
        return self.keep(fr.dedup_bags(value, chosen, num_parts=num_parts), once)

    @rule(target=ids, pair=ids, more=st.integers(0, 3), minimum=st.integers(1, 9))
    def pad(self, pair, more, minimum):
        value, x = pair
        wide = value.pad_to(value.capacity + more)
        assert wide.capacity == value.capacity + more and value.unpad().capacity == x.size
        self.keep(wide, x), self.keep(wide.unpad(), x)
        full = x
        if x.inverse is not None:
            most = len(x.inverse[0]) if x.inverse else 0
            full = lists.with_bags(x, [max(n, min(bucket(n, minimum=minimum), most)) for n in x.counts])
        in_bucket = fr.pad_to_bucket(value, minimum=minimum)
        assert in_bucket.capacity == bucket(x.size, minimum=minimum)
        return self.keep(in_bucket, full)

    @rule(target=ids, pair=ids, how=st.sampled_from(["garbage", "pickle", "map", "copy", "flatten", "double"]))
    def same(self, pair, how):
        """The same value by another way: other padding, another process, a tree of its leaves."""
        value, x = pair
        form, leaves = fr.tree.structure(value), fr.tree.leaves(value)
        ways = {
            "garbage": garbage_padding,
            "pickle": lambda v: pickle.loads(pickle.dumps(v)),
            "map": lambda v: fr.tree.map(lambda t: t + 0, v),
            "copy": fr.copy,
            "flatten": lambda v: fr.tree.unflatten(form, leaves),
            "double": lambda v: v.to(dtype=torch.float64),
        }
        return self.keep(ways[how](value), x)

    @rule(pair=ids, seed=SEEDS)
    def lookup(self, pair, seed):
        """Pooled rows of each key, and their groups, are sums over the lists."""
        value, x = pair
        if not x.keys or (x.ragged and x.inverse is None):
            return
        names = list(dict.fromkeys(x.keys))
        tables = {k: torch.randint(-4, 5, (10, 1 + i), generator=torch.Generator().manual_seed(seed)) / 4
                  for i, k in enumerate(names)}  # fmt: skip
        weighted = {k: x.columns[x.keys.index(k)].weights is not None and bool(seed >> i & 1)
                    for i, k in enumerate(names)}  # fmt: skip
        features = [fr.FeatureConfig(k, table=k, weighted=weighted[k]) for k in names]
        acts = fr.lookup(tables, value, features)
        need = lists.pooled(x, {k: w.tolist() for k, w in tables.items()}, weighted)
        assert {k: acts[k].tolist() for k in acts} == need
        groups = [names[::-1], names[:1]]
        rows = [[[v for k in group for v in need[k][e]] for e in range(x.num_examples)] for group in groups]
        assert [g.tolist() for g in fr.regroup([acts[::-1]], groups)] == [r[::-1] for r in rows]


def test_any_sequence_of_operations_is_that_of_lists():
    """Each value that a sequence of operations makes equals its lists. FUNCREC_MACHINES asks for more sequences."""
    few = settings(max_examples=int(os.environ.get("FUNCREC_MACHINES", "100")), stateful_step_count=25)
    run_state_machine_as_test(Machine, settings=few)
