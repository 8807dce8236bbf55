"""One build of the server for all tests: that of `make serving` where there is one, else kernels/serving/http alone."""

import pytest
from programs import answers, serving


@pytest.fixture(scope="session")
def program():
    whole = serving.ROOT / "build" / "serving" / "CMakeCache.txt"
    return answers.build() / "funcrec-serve-sums" if whole.exists() else serving.build()


@pytest.fixture(scope="module")
def server(program):
    with serving.Server(program, "sums") as running:
        yield running
