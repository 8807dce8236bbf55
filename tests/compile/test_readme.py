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
    first, last, mean = capsys.readouterr().out.splitlines()
    assert [first, mean] == [re.search(r"print\((?:grads|f).*# (.*)", b)[1] for b in blocks]
    assert float(last) < 0.5, "ln 2 is where it began"
