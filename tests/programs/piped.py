"""Pipelines on real ranks. Each rank compares a pipeline with a plain loop."""

import threading
import time

import torch
from funcrec.kernels import library

import funcrec as fr
from funcrec.loop.pipelines._pipeline import CALL
from funcrec.sharding import _route
from programs import training

BAGS, ROOM, LATE_S = 4, 32, 0.06
SHAPES = {"a": (11, 4), "b": (7, 4)}  # a small model, because each pipeline stages its own programs
FEATURES = (fr.FeatureConfig("f", table="a", column="u"), fr.FeatureConfig("g", table="b", column="v", pooling="mean"))


def mesh_of(axes):
    return fr.Mesh.distributed(**axes, timeout_s=20.0)


def threads():
    return [t.name for t in threading.enumerate() if t.name == CALL]


def own(mesh, number, bags=BAGS, room=ROOM):
    mine = fr.shard(training.batch(number, bags), fr.P(mesh.axis_names), mesh=mesh)
    return fr.Batch(mine.ids.unpad().pad_to(room), mine.label)


def step_of(mesh, plan, **how):
    step = fr.train_step(training.loss_fn, **training.optimizers("adam"), mesh=mesh, plan=plan, **how)
    return step, step.init(training.params())


def plan_of(kind, axes={"x": 2}):  # noqa: B006
    return fr.Plan.uniform(kind, SHAPES, fr.Mesh.emulated(**axes))


def params(name=None):
    tables = fr.init(fr.key(1), [fr.TableConfig(n, *s) for n, s in SHAPES.items()])
    return fr.Params(tables, {"w": torch.linspace(-1, 1, 8)})


def loss_fn(params, batch):
    logits = fr.lookup(params.tables, batch.ids, FEATURES).values @ params.dense["w"]
    return fr.losses.bce(logits, batch.label, batch.weight)


def small_step(mesh, plan, **how):
    """Return (a step of the small model, its first state)."""
    step = fr.train_step(loss_fn, **training.optimizers("adam"), mesh=mesh, plan=plan, **how)
    return step, step.init(params())


def loop(step, state, batches):
    out = []
    for batch in batches:
        state, metrics = step(state, batch)
        out.append(metrics)
    return state, out


def run(pipe, state, batches):
    out = []
    for state, metrics in pipe.run(state, batches):  # noqa: B007, B020
        out.append(metrics)
    return state, out


def is_same(a, b):
    xs, ys = fr.tree.leaves(a), fr.tree.leaves(b)
    if len(xs) != len(ys):
        return False
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(xs, ys, strict=True))


def asserted():
    """Return (steps before the error, the error) of a pipeline whose step exchanges the batch, and asserts of what it
    received and of its state. The third batch is negative."""
    mesh = mesh_of({"x": 2})
    exchange = fr.shard_map(
        lambda x: fr.all_to_all(x, "x", tiled=True), mesh=mesh, in_specs=fr.P("x"), out_specs=fr.P("x")
    )

    def step(state, x):
        received = exchange(x)
        torch._assert_async((received >= 0).all())
        torch._assert_async(state.isfinite())
        return state + 1, {}

    batches, seen, told = [torch.arange(4.0) - 9 * (i == 2) for i in range(4)], 0, ""
    try:
        for _ in fr.pipeline(step, mesh=mesh).run(torch.tensor(0.0), batches):
            seen += 1
    except RuntimeError as error:
        told = str(error)
    return seen, told


def no_ids():
    return fr.KeyedJaggedTensor.from_lists({"u": [[], []], "v": [[], []]}, dtype=torch.int64).pad_to(ROOM)


def beside_a_loop(axes, plan, count, how):
    """Return (whether states and metrics equal those of the plain loop, the bytes sent ahead, threads left)."""
    mesh = mesh_of(axes)
    batches = [own(mesh, i) for i in range(count)]
    want = loop(*small_step(mesh, plan, **how), batches)
    step, state = small_step(mesh, plan, **how)
    pipe = fr.pipeline(step, mesh=mesh)
    got = run(pipe, state, iter(batches))
    return is_same(got, want), pipe.routed_bytes, threads()


def donated():
    """Return the same as `beside_a_loop` for a jitted step that donates its state, or None if the state was not
    donated."""
    mesh, plan = mesh_of({"x": 2}), fr.Plan({"a": fr.row_wise("x")})
    loss = lambda p, b: (fr.lookup(p.tables, b.ids, training.FEATURES[:1]).values @ p.dense).square().mean()
    kind = {"sparse": fr.optim.rowwise_adagrad(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    batches = [own(mesh, i) for i in range(4)]

    def start():
        step = fr.train_step(loss, **kind, mesh=mesh, plan=plan, capacity=20)
        tables = fr.init(fr.key(1), [fr.TableConfig("a", 11, 4)])
        return fr.jit(step, donate=("state",)), step.init(fr.Params(tables, torch.ones(4)))

    want = loop(*start(), batches)
    step, state = start()
    pipe = fr.pipeline(step, mesh=mesh)
    got = run(pipe, state, iter(batches))
    try:
        state.tables["a"] + 1
    except fr.DonatedError:
        return is_same(got, want), pipe.routed_bytes, threads()


def of_many_forms():
    """Return (whether a pipeline gives a plain loop's state, threads left). Batches differ in size, one has no ids, the
    plan changes, and `reshard` writes tables."""
    mesh, plan = mesh_of({"x": 2}), plan_of("row_wise")
    empty = own(mesh, 3)
    empty = fr.Batch(no_ids(), empty.label)
    batches = [own(mesh, 0), own(mesh, 1, 8, 64), empty, own(mesh, 2), own(mesh, 4, 8, 64), own(mesh, 5), own(mesh, 6)]
    other = plan_of("table_wise")
    sparse = training.optimizers("adam")["sparse"]
    step, state = small_step(mesh, plan)
    want = state
    for i, batch in enumerate(batches):
        want = fr.reshard(want, other, mesh=mesh, sparse=sparse) if i == 4 else want
        want, _ = step(want, batch)
    pipe, got = fr.pipeline(step, depth=3, mesh=mesh), state
    for i, batch in enumerate(pipe.ahead(batches)):
        got = fr.reshard(got, other, mesh=mesh, sparse=sparse) if i == 4 else got
        got, _ = pipe(got, batch)
    return is_same(got, want), threads()


def retried():
    """Return ({first capacity: whether results are those of a plain loop}, threads left) for a pipeline of steps with
    little capacity. The steps repeat an overflowing block."""
    mesh, plan = mesh_of({"x": 2}), plan_of("row_wise")
    make = lambda capacity: small_step(mesh, plan, capacity=capacity)[0]
    state, batches = small_step(mesh, plan)[1], [own(mesh, i) for i in range(5)]
    want, made = loop(small_step(mesh, plan)[0], state, batches), {}
    for first in (1, "measure"):
        retry = fr.retry_overflow(make, capacity=first, steps=2)
        state_, metrics = run(fr.pipeline(retry, mesh=mesh), state, batches)
        made[first] = is_same((state_, [m["loss"] for m in metrics]), (want[0], [m["loss"] for m in want[1]]))
    return made, threads()


def uneven():
    """Return (whether the states equal a loop in which rank 1 gets blank batches, the error for batches without
    weights, the number of steps before that error, whether these steps equal a loop, threads left). Rank 1 has three
    batches, rank 0 five."""
    mesh, plan = mesh_of({"x": 2}), plan_of("row_wise")
    count = 5 if mesh.coordinates["x"] == 0 else 3
    (step, state), batches = small_step(mesh, plan), [own(mesh, i) for i in range(5)]
    batches = [fr.Batch(b.ids, b.label, weight=torch.tensor([1.0, 2.0])) for b in batches]
    blank = fr.Batch(no_ids(), torch.zeros(2), weight=torch.zeros(2))
    want = loop(step, state, [b if i < count else blank for i, b in enumerate(batches)])
    filled = is_same(run(fr.pipeline(step, mesh=mesh), state, batches[:count]), want)
    bare = [own(mesh, i) for i in range(5)]
    step, state = small_step(mesh, plan)
    want, seen, told = loop(step, state, bare[:3])[0], [], ""
    try:
        for now, _ in fr.pipeline(step, mesh=mesh).run(state, bare[:count]):
            seen.append(now)
    except ValueError as error:
        told = str(error)
    return filled, told, len(seen), is_same(seen[-1], want), threads()


def broken(how):
    """Run with a fault on rank 1 alone: batch 2 raises in the loader or has another form or other keys. Then run again.

    Return (this rank's error, the number of steps before the error, whether the second run equals a plain loop, threads
    left)."""
    mesh, plan = mesh_of({"x": 2}), plan_of("row_wise")
    step, state = small_step(mesh, plan)
    pipe, seen, told = fr.pipeline(step, mesh=mesh), 0, ""

    def batches():
        for i in range(4):
            if i == 2 and mesh.coordinates["x"] == 1:
                if how == "raises":
                    raise LookupError("no such file")
                odd = own(mesh, i, room=ROOM + 8 * (how == "form"))
                ids = fr.KeyedJaggedTensor(odd.ids.values, odd.ids.offsets, keys=("u", "x"))
                yield fr.Batch(ids, odd.label) if how == "keys" else odd
            yield own(mesh, i)

    try:
        for _ in pipe.run(state, batches()):
            seen += 1
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    again = [own(mesh, i) for i in range(3)]
    return told, seen, is_same(run(pipe, state, again), loop(step, state, again)), threads()


def left_alone(timeout_s):
    """Return the seconds until this rank is out of its loop. Rank 0 leaves its loop before the first step."""
    mesh, plan = fr.Mesh.distributed(x=2, timeout_s=timeout_s), plan_of("row_wise")
    step, state = small_step(mesh, plan)
    pipe, batches, begin = fr.pipeline(step, mesh=mesh), [own(mesh, i) for i in range(3)], time.perf_counter()
    try:
        for batch in pipe.ahead(batches):
            if mesh.coordinates["x"] == 0:
                raise LookupError
            pipe(state, batch)
    except (LookupError, RuntimeError):
        pass
    return time.perf_counter() - begin


def none_at_all():
    """Return (the error of this rank, threads left). Rank 0 has no batch."""
    mesh = mesh_of({"x": 2})
    step, state = small_step(mesh, plan_of("row_wise"))
    try:
        list(fr.pipeline(step, mesh=mesh).run(state, [own(mesh, 0)] * mesh.coordinates["x"]))
    except ValueError as error:
        return str(error), threads()


def left_early():
    """Return (whether a loop over three batches equals a plain loop, threads left). An earlier loop skips the first
    batch, and both ranks leave it after the second: rank 1 while its loader is busy, rank 0 when its thread has gone
    on."""
    mesh, plan = mesh_of({"x": 2}), plan_of("row_wise")
    step, state = small_step(mesh, plan)
    pipe, rank = fr.pipeline(step, mesh=mesh, depth=3), mesh.coordinates["x"]
    batches = [own(mesh, i) for i in range(6)]

    def loader():
        for i, batch in enumerate(batches):
            time.sleep(0.1 if rank == 1 and i == 3 else 0)
            yield batch

    got = state
    for i, batch in enumerate(pipe.ahead(loader())):
        if i == 1:
            got, _ = pipe(got, batch)
            time.sleep(0.3 if rank == 0 else 0)
            break
    want = step(state, batches[1])[0]
    return is_same(run(pipe, got, batches[:3]), loop(step, want, batches[:3])), threads()


# -- a slow link ---------------------------------------------------------------------------------------------------


def late(x, seconds):
    time.sleep(seconds)
    return x.clone()


def with_late_ids(seconds):
    """Delay the ids that this rank sends, and return a function that ends the delay."""
    library.define("piped", "late", "(Tensor x, float seconds) -> Tensor", late, lambda x, seconds: torch.empty_like(x))
    send = _route.all_to_all
    op = torch.ops.piped.late
    _route.all_to_all = lambda xs, axes: send(tuple(op(x, seconds) for x in xs), axes)
    return lambda: setattr(_route, "all_to_all", send)


def hidden(count=6):
    """Return (seconds per step of the plain loop, seconds per step of the pipeline, whether their states are equal).
    Ids are late, and the rest of a step takes as long."""
    mesh, plan = mesh_of({"x": 2}), plan_of("row_wise")
    undo = with_late_ids(LATE_S)
    try:
        step, state = small_step(mesh, plan)
        batches = [own(mesh, i) for i in range(count)]

        def timed(steps):
            times = [time.perf_counter()]
            last = None
            for now in steps:
                time.sleep(LATE_S)
                times.append(time.perf_counter())
                last = now
            return last, (times[-1] - times[2]) / (count - 2)

        def plain(now):
            for batch in batches:
                now, _ = step(now, batch)
                yield now

        want, slow_s = timed(plain(state))
        got, fast_s = timed(s for s, _ in fr.pipeline(step, mesh=mesh).run(state, batches))
        return slow_s, fast_s, is_same(got, want)
    finally:
        undo()


def refusals():
    """Return {name: what a pipeline of a step raises, or the number of its steps} on this rank."""
    mesh, told = mesh_of({"x": 4}), {}
    swap = lambda mesh, axis: fr.shard_map(
        lambda x: fr.all_to_all(x, axis, tiled=True), mesh=mesh, in_specs=fr.P(axis), out_specs=fr.P(axis)
    )
    exchange, elsewhere = swap(mesh, "x"), swap(mesh_of({"y": 2, "z": 2}), "y")
    held, tracked = torch.ones(16), torch.ones((), requires_grad=True)
    grown = lambda x: fr.while_loop(lambda c: c.sum() < 0, exchange, x)
    steps = {
        "no exchange": lambda state, x: (state + x.sum(), {}),
        "another mesh": lambda state, x: (state + elsewhere(x).sum(), {}),
        "a tracked tensor": lambda state, x: (state + tracked * exchange(x).sum(), {}),
        "a write": lambda state, x: (state + exchange(x * held).long().sum(), {}),
        "a donated batch": fr.jit(lambda state, x: (state + exchange(x).sum(), {}), donate=("state", "x")),
        "an exchange in a loop": fr.jit(lambda state, x: (state + grown(x).sum(), {})),
    }
    for name, step in steps.items():
        seen = 0
        try:
            pipe = fr.pipeline(step, mesh=mesh)
            for _ in pipe.run(torch.tensor(0.0), [torch.arange(16.0)] * 3):
                seen += 1
                while seen < 3 and not pipe.under_way.following().is_done:
                    time.sleep(0.01)
                held.add_(1)  # The next batch's values are under way.
        except (TypeError, ValueError) as error:
            told[name] = f"{seen}: {error}"
        else:
            told[name] = str(seen)
    return told, threads()
