"""Measures operations on jagged buffers: funcrec under jit, FBGEMM's operators, TorchRec's methods.

permute: puts the bags of all keys in another order. regroup: gathers columns of two keyed tensors into groups.
  bucketize:
sorts ids by owner, for row-wise shards. to_padded, from_padded: convert bags of vectors to a padded block, and back.
bag_sum, bag_max, bag_softmax: reduce bags of vectors, beside torch.segment_reduce. lookup_max: a lookup that pools by
maximum, beside torch's embedding_bag.
"""

from collections.abc import Callable

import cases
import torch
from cases import JaggedCase
from contest import OURS, Closeness, Contender, Setting, Traffic, compete
from funcrec.kernels import ops
from peers import fbgemm_operators, quiet
from torch import Tensor

import funcrec as fr

SHARDS, ROWS = 8, 2**20
EXACT = Closeness(0.0, 0.0)


def contender(call: Callable[[], dict[str, Tensor]]) -> Contender:
    return Contender(call, call)


def make_ids(case: JaggedCase, device: str) -> fr.KeyedJaggedTensor:
    """Return ragged bags of i64 ids."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, case.longest + 1, (case.num_features * case.batch,), generator=draw)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
    keys = [f"f{i}" for i in range(case.num_features)]
    return cases.to_device(fr.KeyedJaggedTensor.from_lengths(keys, values, lengths), device)


def permute(case: JaggedCase, device: str) -> tuple[dict, int]:
    ids = make_ids(case, device)
    order = ids.keys[::-1]
    moved = fr.jit(lambda ids: ids.permute(order))

    def ours():
        out = moved(ids)
        return {"values": out.values, "offsets": out.offsets}

    def fbgemm():
        o = fbgemm_operators()
        lengths = ids.offsets.diff().view(case.num_features, case.batch)
        which = torch.arange(case.num_features - 1, -1, -1, dtype=torch.int32, device=device)

        def call():
            out, values, _ = o.permute_2D_sparse_data(which, lengths, ids.values, None, ids.capacity)
            return {"values": values, "offsets": o.asynchronous_complete_cumsum(out.flatten())}

        return contender(call)

    return {OURS: lambda: contender(ours), "fbgemm": fbgemm}, 2 * (ids.values.nbytes + ids.offsets.nbytes)


def regroup(case: JaggedCase, device: str) -> tuple[dict, int]:
    parts = []
    for p in range(2):
        keys = tuple(f"p{p}_{i}" for i in range(case.num_features // 2))
        values = torch.randn(case.batch, len(keys) * case.dim, device=device)
        parts.append(fr.KeyedTensor(values, keys, (case.dim,) * len(keys)))
    names = [k for pair in zip(*(p.keys for p in parts), strict=True) for k in pair]
    groups = [names[::2], names[1::2][::-1]]
    gathered = fr.jit(lambda parts: fr.regroup(parts, groups))
    named = lambda out: {f"group {i}": x for i, x in enumerate(out)}

    def torchrec():
        with quiet():
            from torchrec.sparse.jagged_tensor import KeyedTensor
        theirs = [KeyedTensor(list(p.keys), list(p.dims), p.values) for p in parts]
        return contender(torch.no_grad()(lambda: named(KeyedTensor.regroup(theirs, groups))))

    def fbgemm():
        o, keys = fbgemm_operators(), [k for p in parts for k in p.keys]
        order = torch.tensor([keys.index(k) for group in groups for k in group], device=device)
        ends = torch.arange(len(keys) + 1, device=device) * case.dim
        widths = [len(group) * case.dim for group in groups]

        def call():
            joined = torch.cat([p.values for p in parts], 1)
            moved = o.permute_pooled_embs_auto_grad(joined, ends, order, ends, order.argsort())
            return named(moved.split(widths, 1))

        return contender(torch.no_grad()(call))

    builders = {OURS: lambda: contender(lambda: named(gathered(parts))), "torchrec": torchrec, "fbgemm": fbgemm}
    return builders, 2 * sum(p.values.nbytes for p in parts)


def bucketize(case: JaggedCase, device: str) -> tuple[dict, int]:
    ids, block = make_ids(case, device), ROWS // SHARDS
    split = fr.jit(lambda rows, offsets: ops.bucketize(rows, offsets, None, SHARDS, block))

    def ours():
        rows, lengths, _, positions = split(ids.values, ids.offsets)
        return {"rows": rows, "lengths": lengths, "positions": positions}

    def fbgemm():
        o, lengths = fbgemm_operators(), ids.offsets.diff()
        blocks = torch.full((case.num_features,), block, device=device)

        def call():
            out = o.block_bucketize_sparse_features(lengths, ids.values, False, True, blocks, SHARDS)
            return {"rows": out[1], "lengths": out[0], "positions": out[4]}

        return contender(call)

    return {OURS: lambda: contender(ours), "fbgemm": fbgemm}, 3 * ids.values.nbytes + (SHARDS + 1) * ids.offsets.nbytes


def vectors(case: JaggedCase, device: str) -> tuple[fr.JaggedTensor, Tensor]:
    """Return (bags of vectors, a padded block with room for the longest bag)."""
    ids = make_ids(case, device)
    values = torch.randn(ids.capacity, case.dim, device=device)
    padded = torch.randn(case.batch, case.longest, case.dim, device=device)
    return fr.JaggedTensor(values, ids.offsets), padded


def to_padded(case: JaggedCase, device: str) -> tuple[dict, int]:
    bags, padded = vectors(case, device)
    fill = fr.jit(lambda bags: bags.to_padded(case.longest))

    def fbgemm():
        o = fbgemm_operators()
        call = lambda: {"padded": o.jagged_to_padded_dense_forward(bags.values, [bags.offsets], [case.longest], 0.0)}
        return contender(call)

    return {
        OURS: lambda: contender(lambda: {"padded": fill(bags)}),
        "fbgemm": fbgemm,
    }, bags.values.nbytes + padded.nbytes


def from_padded(case: JaggedCase, device: str) -> tuple[dict, int]:
    bags, padded = vectors(case, device)
    capacity = bags.capacity
    cut = fr.jit(lambda padded, offsets: ops.from_padded(padded, offsets, capacity))

    def fbgemm():
        o = fbgemm_operators()
        return contender(lambda: {"values": o.dense_to_jagged(padded, [bags.offsets], capacity)[0]})

    ours = lambda: {"values": cut(padded, bags.offsets)}
    return {OURS: lambda: contender(ours), "fbgemm": fbgemm}, 2 * bags.values.nbytes


def bag_sum(case: JaggedCase, device: str) -> tuple[dict, int]:
    return reduction(case, device, "sum")


def bag_max(case: JaggedCase, device: str) -> tuple[dict, int]:
    return reduction(case, device, "max")


def reduction(case: JaggedCase, device: str, how: str) -> tuple[dict, int]:
    bags, _ = vectors(case, device)
    reduce = fr.jit(lambda bags: fr.bag_reduce(bags, how))
    plain = lambda: {"bags": torch.segment_reduce(bags.values, how, offsets=bags.offsets)}
    builders = {OURS: lambda: contender(lambda: {"bags": reduce(bags)}), "torch": lambda: contender(plain)}
    return builders, bags.values.nbytes + case.batch * case.dim * 4


def bag_softmax(case: JaggedCase, device: str) -> tuple[dict, int]:
    bags, _ = vectors(case, device)
    shared = fr.jit(fr.bag_softmax)

    def plain():
        lengths, size = bags.offsets.diff(), bags.capacity
        spread = lambda x: x.repeat_interleave(lengths, 0, output_size=size)
        greatest = torch.segment_reduce(bags.values, "max", offsets=bags.offsets)
        raised = (bags.values - spread(greatest)).exp()
        return {"values": raised / spread(torch.segment_reduce(raised, "sum", offsets=bags.offsets))}

    ours = lambda: {"values": shared(bags).values}
    return {OURS: lambda: contender(ours), "torch": lambda: contender(plain)}, 2 * bags.values.nbytes


def lookup_max(case: JaggedCase, device: str) -> tuple[dict, int]:
    ids = make_ids(case, device)
    table = torch.randn(ROWS // 8, case.dim, device=device)
    ids = fr.KeyedJaggedTensor(ids.values % len(table), ids.offsets, None, None, ids.keys)
    features = [fr.FeatureConfig(ids.keys[0], table="t", pooling="max")]
    look = fr.jit(lambda table, ids: fr.lookup({"t": table}, ids, features).values)
    embedding_bag = torch.nn.functional.embedding_bag
    plain = lambda: embedding_bag(ids.values, table, ids.offsets, mode="max", include_last_offset=True)
    builders = {
        OURS: lambda: contender(lambda: {"bags": look(table, ids)}),
        "torch": lambda: contender(torch.no_grad()(lambda: {"bags": plain()})),
    }
    return builders, ids.values.nbytes + ids.capacity * case.dim * 4 + case.batch * case.dim * 4


OPS = {
    f.__name__: f
    for f in (permute, regroup, bucketize, to_padded, from_padded, bag_sum, bag_max, bag_softmax, lookup_max)
}
CLOSE = Closeness(1e-5, 1e-6)


def run(case: JaggedCase, setting: Setting) -> dict:
    case = cases.tiny(case) if setting.tiny else case
    builders, moved = OPS[case.op](case, setting.device)
    traffic = Traffic(moved, max(case.dim, 16), torch.float32)
    closeness = CLOSE if case.op in ("bag_sum", "bag_softmax") else EXACT
    return {"shape": case._asdict(), **compete(builders, setting, closeness, traffic)}


CASES, QUICK = cases.JAGGED, ("permute", "to_padded")
