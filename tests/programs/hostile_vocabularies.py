"""Generated calls of the operations on vocabularies, with any tags, entries, ids, rows and counts. See hostile.py.

Shapes: N ids, R rows, M changed rows.
"""

import torch
from funcrec.kernels import reference
from funcrec.kernels.forms import flatten
from funcrec.kernels.reference_quantized import mix
from funcrec.kernels.reference_vocabulary import bucket_of
from funcrec.kernels.vocabulary import EVERYONE, SCORED, SLOTS, Admission, Column, columns_of, shared_of
from torch import Tensor

from programs.hostile_draw import EXTREMES, I32, I64, Draw, Result


def state(draw: Draw, salt: int, least: int) -> tuple[list[Tensor], Tensor]:
    """Return tags, entries and maybe a sketch, and the pool of ids. Some ids of the pool have a row, which may be one
    of another bucket, with the tag of another id; some rows hold one id."""
    num_rows, pool = SLOTS * draw.one(1, 2, 3, 7), draw.mix(torch.arange(draw.one(3, 200, 900)) * 977 - 999, 0.05)
    tags = torch.randint(0, 256, (num_rows,), generator=draw.generator)
    entries = torch.randint(-(2**63), 2**63 - 1, (num_rows, 2), generator=draw.generator)
    held = pool[torch.randint(0, pool.shape[0], (draw.one(0, 50, 800),), generator=draw.generator)]
    h = mix(held ^ salt)
    slot = torch.randint(0, SLOTS, held.shape, generator=draw.generator)
    for i, row, tag in zip(held.tolist(), (bucket_of(h, num_rows) * SLOTS + slot).tolist(), (h & 255).tolist()):
        tags[row], entries[row, 0] = max(tag, 1), i
    if draw.one(0, 1):  # stamps and counts near now, so that many are equal
        entries[:, 1] = torch.randint(90, 103, (num_rows,), generator=draw.generator) << 32 | entries[:, 1] & 3
    tags[torch.rand(num_rows, generator=draw.generator) < draw.one(0, 0.05, 0.7)] = 0
    sketch = torch.randint(0, 1 + draw.one(1, 4, 255), (num_rows,), generator=draw.generator)
    made = [tags.to(torch.uint8), entries, sketch.to(torch.uint8)][: 3 if least else 2]
    return [draw.place(x) for x in made], pool


def ids_of(draw: Draw, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids i[N], many of the pool, and the number of valid ones."""
    n = draw.size()
    ids = draw.mix(pool[torch.randint(0, pool.shape[0], (n,), generator=draw.generator)], draw.one(0, 0.1))
    return draw.put(ids.to(draw.one(I32, I64, I64))), draw.place(
        torch.tensor(draw.one(n, n, n // 2, n + 1, draw.one(*EXTREMES)))
    )


def settings(draw: Draw) -> tuple[int, int, Tensor]:
    return (
        draw.one(0, 5, -(2**63), 2**63 - 1),
        draw.one(0, 0, 2, 9, 255),
        draw.place(torch.tensor(draw.one(100, 2**32 + 5))),
    )


def find_ids(draw: Draw) -> Result:
    salt, _, _ = settings(draw)
    vocabulary, pool = state(draw, salt, 0)
    given = (*vocabulary, *ids_of(draw, pool), draw.one(0, 1, 7, 2**31 - 1), salt)
    return Result(lambda: [torch.ops.funcrec_cpp.find_ids(*given)], [reference.find_ids(*given)])


def admit_ids(draw: Draw) -> Result:
    salt, least, now = settings(draw)
    vocabulary, pool = state(draw, salt, least)
    policy, scores = draw.random.randrange(4), None
    if policy == SCORED:
        scores = torch.randint(-3, 4, vocabulary[0].shape, generator=draw.generator)
        scores = draw.place(draw.mix(scores, draw.one(0, 0.5)))
    how = policy, draw.one(0, 3, 2**40), least, draw.one(EVERYONE, EVERYONE, EVERYONE // 3, 0), draw.one(0, 2), salt
    given = (vocabulary, now, *ids_of(draw, pool), scores, *how)
    return Result(lambda: [*torch.ops.funcrec_cpp.admit_ids(*given)], [*reference.admit_ids(*given)])


def settle_ids(draw: Draw) -> Result:
    salt, least, now = settings(draw)
    vocabulary, pool = state(draw, salt, least)
    (ids, _), num_rows = ids_of(draw, pool), vocabulary[0].shape[0]
    n, m = ids.shape[0], draw.one(0, 1, 40, 128)
    rows = draw.place(draw.mix(torch.randint(-1, num_rows + 2, (n,), generator=draw.generator), draw.one(0, 0.3)))
    missed = draw.place(torch.rand(n, generator=draw.generator) < draw.one(0, 0.5))
    changed = torch.randperm(num_rows, generator=draw.generator)[:m]
    changed = torch.where(torch.rand(m, generator=draw.generator) < 0.1, draw.one(-1, num_rows, *EXTREMES[:2]), changed)
    counts = draw.place(draw.mix(torch.randint(0, 5, (m,), generator=draw.generator), 0.2))
    new_ids = draw.place(draw.mix(torch.arange(m), 0.2))
    numbers = draw.place(torch.tensor([draw.one(m, m, m // 2, draw.one(*EXTREMES)), 0, 0, 0]))
    given = (vocabulary, now, ids, rows, missed, draw.place(changed), new_ids, counts, numbers, least, salt)
    return Result(lambda: [*torch.ops.funcrec_cpp.settle_ids(*given)], [*reference.settle_ids(*given)])


# -- several vocabularies ----------------------------------------------------------------------------------------


def buffers_of(draw: Draw, pools: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Return buffers of ids, their offsets, and columns, no two with the same bag. Ids are of any vocabulary's pool."""
    ids, offsets, columns = [], [], []
    for k in range(draw.one(1, 1, 2, 3)):
        bags = draw.size() // (4 if draw.is_large else 1)
        buffer, _ = ids_of(draw, torch.cat(pools))
        ids.append(buffer)
        at = 0
        while at < bags and draw.random.random() < 0.8:
            first, last = sorted(draw.random.randint(at, bags) for _ in range(2))
            columns.append(Column(draw.random.randrange(len(pools)), k, first, last - first, draw.one(0, 0, 1, 3)))
            at = last
        offsets.append(draw.offsets(bags, buffer.shape[0]))
    return ids, offsets, flatten(columns)


def find_columns(draw: Draw) -> Result:
    salts = [settings(draw)[0] for _ in range(draw.one(1, 2, 4))]
    made = [state(draw, salt, 0) for salt in salts]
    ids, offsets, columns = buffers_of(draw, [pool for _, pool in made])
    columns = flatten([c for c in columns_of(columns) if c.buffer == 0])
    shared = lambda: shared_of(draw.one(0, 1, 7, 2**31 - 1), draw.one(0, 0, 5, 2**30))
    how = [n for salt in salts for n in (shared(), salt)]
    given = [x for own, _ in made for x in own], ids[0], offsets[0], how, columns
    return Result(lambda: [torch.ops.funcrec_cpp.find_columns(*given)], [reference.find_columns(*given)])


def step_of(draw: Draw):
    """Return (state, scores, buffers, offsets, settings, columns) of a step."""
    tensors, scores, how, pools = [], [], [], []
    for _ in range(draw.one(1, 2, 3)):
        salt, least, now = settings(draw)
        vocabulary, pool = state(draw, salt, least)
        policy = draw.random.randrange(4)
        if policy == SCORED:
            made = torch.randint(-3, 4, vocabulary[0].shape, generator=draw.generator)
            scores.append(draw.place(draw.mix(made, draw.one(0, 0.5))))
        tensors += [*vocabulary[:2], now, *vocabulary[2:]]
        share = draw.one(EVERYONE, EVERYONE, EVERYONE // 3, 0)
        how.append(Admission(policy, draw.one(0, 3, 2**40), least, share, draw.one(0, 2), salt))
        pools.append(pool)
    ids, offsets, columns = buffers_of(draw, pools)
    return tensors, scores, ids, offsets, flatten(how), columns


def admit_columns(draw: Draw) -> Result:
    given = step_of(draw)
    return Result(lambda: [*torch.ops.funcrec_cpp.admit_columns(*given)], [*reference.admit_columns(*given)])


def settle_columns(draw: Draw) -> Result:
    tensors, scores, ids, offsets, how, columns = step_of(draw)
    found = [*reference.admit_columns(tensors, scores, ids, offsets, how, columns)]
    if draw.one(0, 1):  # rows and numbers of no admission
        found[0] = draw.mix(found[0], 0.2, SLOTS)
        found[-1] = draw.mix(found[-1].flatten(), 0.3).view(found[-1].shape)
        found[4] = draw.mix(found[4], 0.2)
    given = tensors, ids, offsets, [draw.place(x) for x in found], how, columns
    return Result(lambda: torch.ops.funcrec_cpp.settle_columns(*given), reference.settle_columns(*given))


VOCABULARIES = (find_ids, admit_ids, settle_ids, find_columns, admit_columns, settle_columns)
