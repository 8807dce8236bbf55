"""The benchmark's rooflines: bytes and products against numbers counted by hand."""

import importlib
from pathlib import Path

import pytest
import torch

import funcrec as fr

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Return the function that imports a file of bench."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def ids(*bags):
    """Return bags of two features, u and i, from two lists of bags."""
    return fr.KeyedJaggedTensor.from_lists(dict(zip("ui", bags, strict=True)))


def test_bytes_of_a_lookup_and_an_update_are_those_counted_by_hand(bench):
    """Two tables of 4 columns and 2 bags of 2 ids, with 3 and 1 distinct rows. A lookup reads 8 ids of 8 bytes and 5
    offsets, writes 2 x 2 x 4 floats, and gathers 4 rows of 16 bytes. An update also reads the ids and 16 floats, and
    reads and writes 4 rows with their state of 4 bytes. A second batch with fewer distinct rows counts in the mean."""
    roofline, cases = bench("roofline"), bench("cases")
    case = cases.TableCase(2, 10, 4, 2, 2)._replace(num_rows=10)
    case = type("Case", (), {**case._asdict(), "names": ["u", "i"], "table_dtype": torch.float32})
    batch = ids([[1, 2], [2, 3]], [[7, 7], [7, 7]])
    assert roofline.lookup_work(case, [batch]) == roofline.Work(64 + 40 + 64, 4 * 16)
    slots = {n: {"sum": torch.zeros(10), "steps": torch.zeros(())} for n in "ui"}
    assert roofline.update_work(case, [batch], slots) == roofline.Work(2 * 168, 4 * 16 + 2 * 4 * 20)
    fewer = ids([[1, 1], [1, 1]], [[7, 7], [7, 7]])
    assert roofline.lookup_work(case, [batch, fewer]).gathered == 3 * 16


def test_work_of_a_step_is_that_counted_by_hand(bench):
    """A DLRM of two tables x 4 and 3 dense inputs, 5 examples. Layers 3 -> 4, 7 -> 6 and 6 -> 1: the first has two
    products, because its inputs need no gradient, the second three, the last, a vector, 6 FLOPs for each number. Three
    vectors make 3 pairs."""
    roofline = bench("roofline")
    tables = [fr.TableConfig(n, 10, 4) for n in "ui"]
    features = [fr.FeatureConfig(n, table=n) for n in "ui"]
    model = fr.models.dlrm(tables, features, num_dense=3, bottom=(4,), sizes=(6,), keep="dense")
    params = model.init(fr.key(0))
    batch = fr.Batch(ids([[1], [1], [2], [3], [3]], [[0]] * 5), torch.ones(5), torch.ones(5, 3))
    slots = fr.optim.rowwise_adagrad().init(params.tables)
    work = roofline.step_work(model, params, [batch], slots, roofline.Dense(0, True))
    layers = {(5, 3, 4): 1, (4, 5, 3): 1, (5, 7, 6): 1, (6, 5, 7): 1, (5, 6, 7): 1}
    assert work.products == layers
    num_params = (12 + 4) + (42 + 6) + (6 + 1)
    lookup = 10 * 8 + 11 * 8 + 4 * 5 * 8  # ids, offsets, vectors
    interaction = (
        4 * 5 * (3 * 3 * 4 + 2 * 3)
    )  # vectors read twice, cotangents written; products written, cotangents read
    assert work.copied == 2 * lookup + 4 * num_params * 3 + interaction
    assert work.gathered == (3 + 1) * (3 * 16 + 2 * 4)
    assert work.flops == 6 * 5 * 6 + 6 * 5 * 4 * 3
    adagrad = roofline.step_work(model, params, [batch], slots, roofline.Dense(1, False))
    assert adagrad.copied == 2 * lookup + 4 * num_params * 5 and adagrad.flops == 6 * 5 * 6


def test_a_roofline_is_the_sum_of_its_parts(bench):
    """1 GB at 10 GB/s, 0.5 GB at 5 GB/s, two products of 0.02 s, and 2 GFLOP of pairs at the rate of these products,
    which have 1 GFLOP each: 100 + 100 + 40 + 40 ms. A case of 560 ms takes twice its roofline."""
    roofline = bench("roofline")
    shape = (1000, 500, 1000)
    found = roofline.figures(
        roofline.Work(1e9, 0.5e9, {shape: 2}, 2e9),
        {"copy_gb_per_s": 10.0, "gather_gb_per_s": 5.0},
        {shape: 0.02},
        560.0,
    )
    assert found["parts_ms"] == {"copied": 100.0, "gathered": 100.0, "products": 40.0, "pairs": 40.0}
    assert (found["ms"], found["time_over_roofline"], found["gflop"]) == (280.0, 2.0, 4.0)
    assert roofline.figures(roofline.Work(0, 1e9), {"copy_gb_per_s": 1.0, "gather_gb_per_s": 1.0}, {}, 1500.0)[
        "time_over_roofline"
    ] == pytest.approx(1.5)


def test_the_tables_show_rooflines(bench):
    """A line with a roofline has its time and the time over it in the table, a line without one has dashes, and a red
    line as many cells as the head."""
    report = bench("report")
    line = {"case": "a", "threads": 1, "ms": {"funcrec": {"median": 3.0}}, "call_peak_mb": {"funcrec": 1.0}}
    line |= {"ratio": {}, "absent": {}, "samples_per_s": {"funcrec": 10}}
    with_one = {**line, "roofline": {"ms": 2.0, "time_over_roofline": 1.5}}
    red = {"case": "r", "threads": 1, "law": "red"}
    head, _, *rows = report.table([with_one, line, red]).splitlines()
    assert head.split(" | ")[3:5] == ["roofline ms", "time over roofline"]
    assert [r.split(" | ")[3:5] for r in rows] == [["2", "1.50"], ["-", "-"], ["-", "-"]]
    assert {r.count("|") for r in rows} == {head.count("|")}
