"""One program of the server, compiled once, for all tests of it."""

import pytest
from programs import serving


@pytest.fixture(scope="session")
def program():
    return serving.build()


@pytest.fixture(scope="module")
def server(program):
    with serving.Server(program, "sums") as running:
        yield running
