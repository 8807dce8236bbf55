"""Packages that several files of laws use. Each package is compiled once."""

import pytest
from programs import fresh


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    return fresh.export(tmp_path_factory.mktemp("deltas") / "plain", "plain")


@pytest.fixture(scope="session")
def coded(tmp_path_factory):
    return fresh.export(tmp_path_factory.mktemp("deltas") / "coded", "coded")
