"""Plans, schemas, histories and models have an HTML form for notebooks. Plans and histories can be drawn."""

import pickle
import re
import sys
from html.parser import HTMLParser

import pytest
import torch

import funcrec as fr

# a name that must be escaped in HTML
ODD = "<script>&\"'"
TABLES = (fr.TableConfig("item", 1000, 8), fr.TableConfig(ODD, 30, 8))
FEATURES = (fr.FeatureConfig("clicked", table="item"), fr.FeatureConfig(ODD, table=ODD))
MADE = fr.Plan({"item": fr.row_wise("x"), ODD: fr.table_wise("x", rank=1)})
HARDWARE = fr.Hardware("two ranks", 10**9, 1e10, 1e9, 1e9, ranks_per_host=2)
PLANNED = fr.plan(TABLES, FEATURES, {"x": 2}, batch_size=64, hardware=HARDWARE)
HISTORY = [{"epoch": 0, "loss": 0.7, "steps": 3, ODD: 0.5}, {"epoch": 1, "loss": 0.25, "steps": 3}]
FITTED = fr.Fitted(torch.zeros(1), torch.zeros(1), HISTORY)
SWEPT = fr.SweepTable({"lr": torch.tensor([0.25])}, {"loss": torch.tensor([[0.5]])})
SHOWN = {
    "model": (fr.models.deepfm(TABLES, FEATURES), ["1,000", "clicked", ODD]),
    "two towers": (fr.models.two_tower(TABLES, FEATURES[:1], FEATURES[1:]), ["1,000", "clicked", ODD]),
    "schema": (fr.data.Schema(label=ODD, categorical=["item"], weights={"item": "w"}), [ODD, "item", "of item"]),
    "plan": (MADE, ["item", "row_wise", ODD, "x, rank 1"]),
    "plan with a report": (PLANNED, ["item", ODD, PLANNED.reasons["item"]]),
    "history": (FITTED, ["0.7", "0.25", ODD, "0.5", ""]),
    "sweep": (fr.SweepTable({"lr": torch.tensor([0.25])}, {ODD: torch.tensor([[0.5]])}), ["member", "lr", "0.25", ODD]),
    "empty history": (FITTED._replace(history=[]), []),
}


class Cells(HTMLParser):
    """Collect the texts of a table's cells by row, and the table's tags."""

    def __init__(self, page: str):
        super().__init__()
        self.rows, self.tags = [], set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows:
            self.rows[-1][-1] += data


@pytest.mark.parametrize("name", SHOWN)
def test_they_are_tables_of_html(name):
    """Every name is in a cell unchanged and is no markup. Rows have one length. Two calls give the same output."""
    value, want = SHOWN[name]
    page = value._repr_html_()
    found = Cells(page)
    assert found.tags == {"table", "thead", "tbody", "tr", "th"} | ({"td"} if want else set()) | (
        {"caption"} if "report" in name else set()
    )
    assert set(want) <= {x for row in found.rows for x in row}
    assert len({len(row) for row in found.rows}) == 1 and page == value._repr_html_()


def test_a_plans_caption_is_its_headline():
    """The caption above a planned table has the mesh, the estimate and the gap, as in the text of the plan."""
    assert re.search("<caption>(.*)</caption>", PLANNED._repr_html_())[1] == PLANNED.table().splitlines()[0]


def test_a_history_is_drawn():
    """One panel shows the loss by epoch. The next panels show each other number at the epochs where it was measured.
    Times are not drawn."""
    loss, others = FITTED.plot().axes
    assert [line.get_xydata().tolist() for line in loss.lines] == [[[0, 0.7], [1, 0.25]]]
    assert [(line.get_label(), line.get_xydata().tolist()) for line in others.lines] == [(ODD, [[0, 0.5]])]
    assert len(FITTED._replace(history=[{"epoch": 0, "loss": 1.0}]).plot().axes) == 1
    assert FITTED._replace(history=[]).plot().axes[0].lines[0].get_xydata().tolist() == []


def test_nothing_else_knows_of_a_figure():
    """Figures are not registered in pyplot, which would keep and show the figures."""
    from matplotlib import pyplot

    FITTED.plot()
    PLANNED.draw()
    assert pyplot.get_fignums() == []


def test_values_that_show_themselves_are_values():
    """A result of `fit` can be pickled and compared."""
    again = pickle.loads(pickle.dumps(FITTED))
    assert type(again) is fr.Fitted and again.history == HISTORY


@pytest.mark.parametrize(
    "call",
    [FITTED.plot, PLANNED.draw, SWEPT.plot],
    ids=["funcrec.Fitted.plot", "funcrec.Plan.draw", "funcrec.SweepTable.plot"],
)
def test_without_matplotlib_the_error_says_what_to_install(call, monkeypatch, request):
    """Without matplotlib, the error names the call and the extra to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib is not installed(.|\n)*funcrec\[plots\]") as error:
        call()
    assert str(error.value).startswith(request.node.callspec.id)


TABLE = {"a": ["u", "v", "u"], "y": [0, 1, 0]}
SCHEMA = fr.data.Schema(label="y", categorical=["a"])
ENCODING = fr.data.fit_encoding(TABLE, SCHEMA)
EXAMPLES = fr.data.encode(ENCODING, TABLE)
CLICKS = fr.FeatureConfig("clicked", table="item", pooling="none", max_length=4)
TEXTS = {
    "Schema(label='y', categorical=('a',))": SCHEMA,
    "Schema(label='y', multivalued=('a',), weights={'a': 'w'})": fr.data.Schema(
        label="y", multivalued=["a"], weights={"a": "w"}
    ),
    "Examples(3 rows, Schema(label='y', categorical=('a',)))": EXAMPLES,
    "Loader(2 batches of 2)": fr.data.loader(EXAMPLES, None, 2, key=fr.key(0)),
    "Encoding({a: 3}, dense=())": ENCODING,
    "FittedVocabulary(3 ids of text)": ENCODING.ids["a"],
    "deepfm((TableConfig('item'),), (FeatureConfig('clicked'),))": fr.models.deepfm(TABLES[:1], FEATURES[:1]),
    "two_tower((TableConfig('item'),), (FeatureConfig('clicked'),), (FeatureConfig('liked'),))": fr.models.two_tower(
        TABLES[:1], FEATURES[:1], (fr.FeatureConfig("liked", table="item"),)
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_say_what_a_value_is(text):
    """A value's text is its class and what tells it from others, in one line."""
    assert repr(TEXTS[text]) == text
