"""A summary lists each table once, with the numbers of the parameters."""

import re

import pytest

import funcrec as fr
from funcrec.models._summary import in_units

TABLES = (fr.TableConfig("item", 1000, 8), fr.TableConfig("user", 30, 8))
FEATURES = tuple(fr.FeatureConfig(n, table=t) for n, t in (("clicked", "item"), ("seen", "item"), ("user", "user")))
MODELS = {
    "deepfm": lambda: fr.models.deepfm(TABLES, FEATURES),
    "dlrm": lambda: fr.models.dlrm(TABLES, FEATURES, batch_norm=True),
    "lr": lambda: fr.models.lr(*fr.models.linear_twins(TABLES, FEATURES)),
    "two towers": lambda: fr.models.two_tower(TABLES, FEATURES[2:], FEATURES[:2]),
}


@pytest.mark.parametrize("name", MODELS)
def test_its_numbers_are_those_of_the_parameters(name):
    """The summary has the rows, dim, bytes and features of each table, then the sums, then the dense parameters."""
    model = MODELS[name]()
    params = model.init(fr.key(0))
    head, *rows, total, dense = fr.models.summary(model, params).splitlines()
    assert head.split() == ["table", "rows", "dim", "bytes", "features"] and len(rows) == len(params.tables)
    for line, (n, t) in zip(rows, params.tables.items(), strict=True):
        read = [f.name for f in model.features if f.table == n]
        want = [n, f"{t.shape[0]:,}", f"{t.shape[1]}", in_units(t.nbytes), ", ".join(read)]
        assert re.split("  +", line) == want
    every = sum(t.shape[0] for t in params.tables.values()), sum(t.nbytes for t in params.tables.values())
    assert re.split("  +", total) == ["in all", f"{every[0]:,}", in_units(every[1])]
    count = fr.models.num_parameters(params) - sum(t.numel() for t in params.tables.values())
    assert dense.startswith(f"{count:,} dense parameters")
    assert fr.models.summary(model).splitlines() == [head, *rows, total]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (25_600_000, "25.6 MB"),
     (10**12, "1 TB"), (10**15, "1,000 TB")],
)  # fmt: skip
def test_units(size, text):
    """Sizes have three digits and a unit of a power of 1000. The last unit may have more digits."""
    assert in_units(size) == text


def test_parameters_of_another_model_are_refused():
    """summary refuses parameters whose tables belong to another model."""
    model, other = MODELS["deepfm"](), MODELS["lr"]()
    with pytest.raises(ValueError, match="`params` are another model's"):
        fr.models.summary(model, other.init(fr.key(0)))
