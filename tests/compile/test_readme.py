"""The README's program runs and prints what its comments say."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_program_runs(capsys):
    """Each python block of the README runs as it stands; the training in it learns."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    first, last = capsys.readouterr().out.splitlines()
    promised = re.search(r"print\(grads.*# (.*)", blocks[0])[1]
    assert first == promised
    assert float(last) < 0.5, "ln 2 is where it began"
