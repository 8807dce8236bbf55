"""The planner keeps a part of a table's rows in memory, and the others in a store, where the hardware has a disk."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.cached_users import KEY, OPTIMIZERS, batches_of

import funcrec as fr
from funcrec.planner import _costs as costs

CPU = fr.Hardware.named("cpu")
DISK = dataclasses.replace(CPU, memory_bytes=10**9, disk_bytes=10**12, disk_records_per_s=2e5)
LARGE, SMALL = fr.TableConfig("user", 20_000_000, 32), fr.TableConfig("item", 100_000, 32)
READ = [fr.FeatureConfig("user", table="user"), fr.FeatureConfig("item", table="item")]
SKEWED = {"user": fr.TableConstraint(zipf=1.05)}


def planned(hardware=DISK, tables=(LARGE, SMALL), features=READ, **how):
    return fr.plan(tables, features, {"x": 2}, batch_size=1024, hardware=hardware, **{"constraints": SKEWED, **how})


def test_without_a_disk_tables_that_do_not_fit_raise():
    """Tables larger than the memory of all ranks have no plan without a disk, and with a disk a plan that fits."""
    with pytest.raises(ValueError, match="do not fit into memory"):
        planned(dataclasses.replace(DISK, disk_bytes=0, disk_records_per_s=0.0))
    plan = planned()
    assert set(plan.cached) == {"user"} and plan.cached["user"] % 128 == 0
    assert all(r.bytes <= plan.report.memory_bytes for r in plan.report.ranks)
    assert "cached" in plan.table() and fr.Plan.from_json(plan.to_json()).cached == plan.cached


def test_tables_that_fit_stay_in_memory():
    """With room for all rows no table is cached, whatever the disk, and the estimate is that without a disk."""
    roomy = dataclasses.replace(DISK, memory_bytes=10**11)
    plan = planned(roomy)
    assert plan.cached == {}
    assert (
        plan.report.seconds == planned(dataclasses.replace(roomy, disk_bytes=0, disk_records_per_s=0.0)).report.seconds
    )


def test_more_memory_and_a_faster_disk_are_not_slower():
    """The estimate falls, or stays, with more memory and with a faster disk, and a given share is kept."""
    seconds = lambda **changes: planned(dataclasses.replace(DISK, **changes)).report.seconds
    by_memory = [seconds(memory_bytes=m * 10**8) for m in (2, 5, 10, 20, 100)]
    assert by_memory == sorted(by_memory, reverse=True) and by_memory[0] > by_memory[-1]
    by_disk = [seconds(disk_records_per_s=s) for s in (1e3, 1e4, 1e5, 1e6)]
    assert by_disk == sorted(by_disk, reverse=True)
    given = planned(constraints={"user": fr.TableConstraint(zipf=1.05, in_memory=0.01), "item": {"in_memory": 0.5}})
    assert given.cached == {"user": 200_064, "item": 50_048}


def test_tables_of_one_column_are_whole_or_as_told():
    """A column has one cache, so tables that share it are not cached apart."""
    bias = fr.TableConfig("bias", 20_000_000, 1)
    shared = [*READ, fr.FeatureConfig("bias", table="bias", column="user")]
    with pytest.raises(ValueError, match="do not fit into memory"):
        planned(tables=(LARGE, SMALL, bias), features=shared)
    both = {"user": fr.TableConstraint(in_memory=0.05), "bias": fr.TableConstraint(in_memory=0.05)}
    plan = planned(tables=(LARGE, SMALL, bias), features=shared, constraints=both)
    assert plan.cached["user"] == plan.cached["bias"]


def test_plans_that_cached_steps_refuse_are_not_made():
    """Tables of one column have one share in memory, or raise. Copies that train apart are whole in memory, or raise:
    a store has one row for all."""
    bias = fr.TableConfig("bias", 20_000_000, 1)
    shared = [*READ, fr.FeatureConfig("bias", table="bias", column="user")]
    for told in ({"user": {"in_memory": 0.05}}, {"user": {"in_memory": 0.05}, "bias": {"in_memory": 0.1}}):
        with pytest.raises(ValueError, match="column 'user' differ in their shares"):
            planned(tables=(LARGE, SMALL, bias), features=shared, constraints=told)
    copies = {"tables": (SMALL, LARGE), "replicas": "x"}
    with pytest.raises(ValueError, match=r"(?s)do not fit into memory.*try   memory_bytes="):
        planned(**copies)
    with pytest.raises(ValueError, match="'user' has copies that train apart"):
        planned(**copies, constraints={"user": {"in_memory": 0.01}})
    assert planned(dataclasses.replace(DISK, memory_bytes=10**11), **copies).cached == {}


def test_a_share_without_room_for_a_step_is_refused():
    """A given share of rows in memory holds the rows that a step reads, or raises."""
    tight = {"constraints": {"user": {"in_memory": 1e-9}}}
    with pytest.raises(ValueError, match=r"(?s)'user' has too few rows in memory.*in_memory=0\.000"):
        planned(**tight)
    table = fr.TableConfig("user", 100, 8)  # a step reads all rows, which fit into 128
    assert planned(tables=(table, SMALL), constraints={"user": {"in_memory": 0.5}}).cached["user"] == 128


def test_half_of_a_disk_is_refused():
    """A disk has a size and a speed, and a share of rows in memory needs a disk."""
    for half in ({"disk_bytes": 10**9}, {"disk_records_per_s": 1e5}):
        with pytest.raises(ValueError, match="half of a disk"):
            planned(dataclasses.replace(CPU, **half))
    with pytest.raises(ValueError, match="table 'user' needs a disk"):
        planned(CPU, constraints={"user": {"in_memory": 0.1}})


def test_a_disk_that_is_too_small_is_named():
    """Stores that do not fit on the disk raise an error with the size that they need, which suffices."""
    with pytest.raises(ValueError, match="the stores do not fit on the disk") as raised:
        planned(dataclasses.replace(DISK, disk_bytes=10**6))
    size = int(re.search(r"disk_bytes=(\d+)", str(raised.value))[1])
    assert planned(dataclasses.replace(DISK, disk_bytes=size)).cached


@given(
    ids=st.integers(1, 500), rows=st.integers(2, 300), zipf=st.sampled_from([0.0, 0.7, 1.2]), part=st.floats(0, 1),
)  # fmt: skip
def test_missed_rows_are_those_that_are_drawn_least(ids, rows, zipf, part):
    """The expected number of missed rows is that of the rows after the `held` most drawn, by their probabilities."""
    held = int(part * rows)
    p = torch.arange(1, rows + 1, dtype=torch.float64) ** -zipf
    p = p / p.sum()
    want = (1 - (1 - p) ** ids)[held:].sum()
    assert costs.distinct_rows(ids, rows, zipf, held=held) == pytest.approx(float(want), rel=1e-6, abs=1e-9)
    counts = p[torch.randperm(rows, generator=torch.Generator().manual_seed(ids))].tolist()
    assert costs.distinct_rows(ids, rows, counts=counts, held=held) == pytest.approx(float(want), rel=1e-6, abs=1e-9)


def test_a_plan_of_cached_tables_trains():
    """The rows that a plan keeps in memory are the capacity of the cache, and the plan places them."""
    mesh = fr.Mesh.emulated(x=2)
    configs = [fr.TableConfig("user", 700, 3, initializer=fr.normal(0.5)), fr.TableConfig("item", 40, 2)]
    read = [fr.FeatureConfig("user", table="user", pooling="mean"), fr.FeatureConfig("item", table="item")]
    told = {"user": {"in_memory": 0.18}}
    plan = fr.plan(configs, read, mesh, batch_size=20, hardware=DISK, constraints=told, optimizer=OPTIMIZERS["adam"])
    store = fr.table_store(configs[:1], OPTIMIZERS["adam"], key=KEY, mesh=mesh)
    caches = {"users": fr.CacheConfig(store, plan.cached["user"], read[:1])}
    loss = lambda params, batch: fr.lookup(params.tables, batch.ids, read).values.square().sum(1).mean()
    step = fr.train_step(loss, sparse=OPTIMIZERS["adam"], mesh=mesh, plan=plan, admit=False)
    cached = fr.cached_step(step, {"users": store})
    tables = fr.cached_tables({"item": fr.init(KEY, configs)["item"]}, caches)
    state = cached.init(fr.Params(tables, {}))
    for batch in batches_of(1, 2):
        state, metrics = cached(state, batch)
    assert metrics["loss"].isfinite()
