"""The programs of funcrec/examples/OWN_DATA.md run unchanged, and are as short as the page says."""

import re
from pathlib import Path

import pytest

import funcrec as fr

PAGE = Path(fr.__file__).parent / "examples" / "OWN_DATA.md"
SHOP_COLUMNS, SHOP, FLIGHTS_PATH, FLIGHTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(tmp_path, monkeypatch, *blocks):
    """Run the blocks in an empty folder and return the names that the blocks define. Each print must give the text of
    its comment."""
    monkeypatch.chdir(tmp_path)
    printed, names = [], {"__name__": "page"}
    names["print"] = lambda *x: printed.append(" ".join(map(str, x)))
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert printed == re.findall(r"^print\(.*\)  # (.*)$", "".join(blocks), re.MULTILINE) != []
    return names


@pytest.mark.parametrize("block", [SHOP, FLIGHTS], ids=["shop", "flights"])
def test_a_program_has_twenty_lines(block):
    """Without imports, at most twenty lines of at most 120 columns go from columns to predictions, or to a package."""
    lines = [x for x in block.splitlines() if x.strip() and not x.startswith("import ")]
    assert len(lines) <= 20 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("blocks", [(SHOP_COLUMNS, SHOP), (FLIGHTS_PATH, FLIGHTS)], ids=["shop", "flights"])
def test_a_program_trains_and_predicts(tmp_path, monkeypatch, blocks):
    """Training stops early, the best epoch is that of the history, and the saved parameters give the AUC of that
    epoch."""
    names = run(tmp_path, monkeypatch, *blocks)
    history, load = names["done"].history, names["load"]
    assert 1 < len(history) < 20
    best = max(history, key=lambda e: e["auc"])
    found = fr.evaluate(names["model"].apply, names["saved"]["params"], load(names["valid"]), names["auc"])
    assert found == {"auc": best["auc"]}
