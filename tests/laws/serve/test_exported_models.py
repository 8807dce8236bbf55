"""Packages of models give the models' outputs (programs.exported_models has all of them)."""

import pytest
from programs.exported_models import LIMIT, difference

pytestmark = pytest.mark.xdist_group("packages")


# the two of five that differ most
@pytest.mark.parametrize("name", ["dlrm", "two_tower"])
def test_a_package_is_its_model(name):
    """For batches of 0 to 512 bags, some empty, with ids -1 and beyond the tables, the package gives the model's
    outputs."""
    assert difference(name) <= LIMIT
