"""The build of `make serving`, shared by all tests, and one package of every dtype."""

import pytest
from programs import answers, every_dtype, serving


@pytest.fixture(scope="session")
def built():
    return answers.build()


@pytest.fixture(scope="session")
def program(built):
    return built / "funcrec-serve-sums"


@pytest.fixture(scope="module")
def server(program):
    with serving.Server(program, "sums") as running:
        yield running


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return every_dtype.export(tmp_path_factory.mktemp("package") / "every")
