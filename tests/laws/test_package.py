"""A package answers as the function that it was exported of."""

import pytest
from programs import packages

import funcrec as fr

pytestmark = pytest.mark.xdist_group("packages")  # compiled once


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return packages.export(tmp_path_factory.mktemp("packages") / "model")


@pytest.fixture
def package(path):
    return fr.load_package(path)


def same(got, want):
    assert set(got) == set(want)
    for n, x in got.items():
        assert x.shape == want[n].shape and (x.numel() == 0 or (x - want[n]).abs().max() <= 1e-6)


@pytest.mark.parametrize("num_bags", [0, 1, 3, 64, 512])
@pytest.mark.parametrize("most", [0, 1, 5, 40])
def test_one_program_takes_every_batch(package, num_bags, most):
    """Of any number of bags and of ids, of which some are in no table, the package gives what `predict` gives."""
    batch = packages.batch(num_bags, seed=num_bags + most, most=most)
    same(package(batch), packages.predict(packages.params(), batch))
