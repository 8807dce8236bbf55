"""pytest collects what `funcrec.testing.law` decorates: a test for each law and each transform, under its name.

    @law(strategy, reference=g)
    def f(x): ...                     ->  f[value], f[padding], f[arguments], f[grad], f[jvp], ...

pytest finds this plugin where funcrec is installed. It imports no part of funcrec: before a module of tests has
imported `funcrec.testing`, there is nothing to collect.
"""

import sys
from types import FunctionType
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[pytest.Function] | None:
    """Return a test for each law of a decorated function; None for anything else, which pytest then collects."""
    laws = sys.modules.get("funcrec.testing._law")
    if laws is None or not isinstance(obj, FunctionType) or laws.MARK not in vars(obj):
        return None
    tests = laws.law_tests(obj).items()
    return [pytest.Function.from_parent(collector, name=f"{name}[{law}]", callobj=test) for law, test in tests]
