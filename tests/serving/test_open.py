"""How a package is opened: what raises, and what processes share."""

import re
from pathlib import Path

import pytest
from programs import answers, every_dtype

pytestmark = pytest.mark.xdist_group("every_dtype")


def test_what_cannot_run_is_refused_at_open(built, folder, monkeypatch, capfd):
    """If its kernels cannot run here, a package raises at `open`, with one error and without paths of the compiling
    machine."""
    monkeypatch.setenv("FUNCREC_CPU", "v9")
    with pytest.raises(answers.AnswersError, match="cannot answer one bag without ids") as refused:
        answers.Answers(built / "funcrec-answers", folder)
    assert refused.value.failed
    assert "none of the compiled kernels runs here.\n  got   FUNCREC_CPU=v9" in str(refused.value)
    assert str(refused.value).count("API call failed") == 0
    assert capfd.readouterr().err == ""


def mapping(process, file: str) -> dict[str, int]:
    """Return {kind: the KB of a mapped file}."""
    text = Path(f"/proc/{process.process.pid}/smaps").read_text()
    own = text[text.index(f"/{file}\n") :]
    return {n: int(re.search(rf"^{n}: +(\d+)", own, re.M)[1]) for n in ("Rss", "Pss", "Private_Dirty")}


def test_processes_share_the_weights(built, folder):
    """Two processes with one open package share the package's weights in memory. All other memory of a package is below
    5 MB."""
    batch = every_dtype.batch(64)
    asked = batch.ids.num_bags, batch.dense, batch.ids.values, batch.ids.offsets, batch.ids.weights
    program = built / "funcrec-answers"
    with answers.Answers(program, folder) as one, answers.Answers(program, folder) as other:
        for process in (one, other):
            process.run(*asked)
        for process in (one, other):
            held = mapping(process, "weights.safetensors")
            assert held["Rss"] > 0 and held["Private_Dirty"] == 0
            assert held["Pss"] <= 0.75 * held["Rss"]
    assert sum(x.stat().st_size for x in folder.iterdir() if x.name != "weights.safetensors") < 5e6
