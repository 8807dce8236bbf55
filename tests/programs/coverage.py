"""What a process has run so far, written to disk: ranks are killed when their tests are done."""

import sys


def save_coverage() -> None:
    """Write this process's counts of lines, if it counts them."""
    module = sys.modules.get("coverage")
    measured = module and module.Coverage.current()
    if measured:
        measured.save()
