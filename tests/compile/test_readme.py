"""All code of the READMEs runs and prints the text of the comments."""

import ast
import re
from pathlib import Path

import pytest
import torch
from funcrec.kernels import ops
from programs.pages import blocks_of, run, told

import funcrec as fr
from funcrec.testing import assert_trees_close

ROOT = Path(__file__).parents[2]
READMES = ["README.md", "funcrec/README.md", "funcrec/examples/README.md", "kernels/README.md"]
TEXT = "\n".join((ROOT / name).read_text() for name in READMES)
BLOCKS = blocks_of(TEXT)


def is_code(span):
    """Return whether an inline span is code that a reader could type: an import, or a call without `...`."""
    try:
        nodes = list(ast.walk(ast.parse(span)))
    except SyntaxError:
        return False
    left_out = any(isinstance(n, ast.Constant) and n.value is ... for n in nodes)
    return not left_out and any(isinstance(n, (ast.Call, ast.ImportFrom, ast.Import)) for n in nodes)


pytestmark = pytest.mark.xdist_group("readme")  # its blocks run once
SPANS = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
INLINE = [x for x in SPANS if is_code(x)]
COMMANDS = re.findall(r"python -c \"([^\"]*)\"", TEXT)


@pytest.fixture(scope="module")
def session():
    """Run all blocks in order, as a reader does. Return (the names that the blocks define, the output of each
    print)."""
    return run(BLOCKS, "README.md")


def test_the_blocks_run(session):
    """The python blocks, run in order, print the text of the comment after each print. Their training learns."""
    printed = session[1]
    assert len(BLOCKS) >= 3 and told(BLOCKS, printed) == printed
    assert float(printed[1]) < 0.5, "ln 2 is where it began"


@pytest.mark.parametrize("code", INLINE + COMMANDS)
def test_inline_code_runs(code, session):
    """Every import, every call between backticks and every `python -c` runs after the blocks."""
    names = {**session[0], "ops": ops, "fn": session[0]["loss_fn"]}
    exec(compile(code, "README.md", "exec"), names)


def test_the_readme_is_short():
    """The README has at most 8 KiB, and each file and folder that it links to exists."""
    text = (ROOT / READMES[0]).read_text()
    assert len(text.encode()) <= 8 * 1024
    for name in READMES:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text()):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name}: {target}"


def test_there_is_inline_code():
    """`is_code` finds the spans that are code, and leaves out those that only show a form."""
    assert any("vmap" in x for x in INLINE) and COMMANDS
    assert not is_code("jit(donate=...)") and not is_code("exact=True") and not is_code("an ensemble")


def test_the_ensemble_is_a_loop(session):
    """The README's vmap of value_and_grad over stacked parameters equals a loop over the members."""
    names = session[0]
    (code,) = [x for x in INLINE if x.startswith("torch.func.vmap(fr.value_and_grad(")]
    states, batch, loss_fn = names["states"], names["batch"], names["loss_fn"]
    losses, grads = eval(code, dict(names))(states.params, batch)
    for i in range(8):
        one = torch.utils._pytree.tree_map(lambda x, i=i: x[i], states.params)
        loss, want = fr.value_and_grad(loss_fn)(one, batch)
        assert_trees_close(losses[i], loss, rtol=1e-6, atol=1e-6)
        assert_trees_close(grads.dense["w"][i], want.dense["w"], rtol=1e-5, atol=1e-6)
        mine = torch.utils._pytree.tree_map(lambda x, i=i: x[i], grads.tables["item"])
        assert_trees_close(mine.to_dense(), want.tables["item"].to_dense(), rtol=1e-5, atol=1e-6)
