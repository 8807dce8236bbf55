"""Packages of the models answer as the models do (programs.exported_models has all of them)."""

import pytest
from programs.exported_models import LIMIT, difference

pytestmark = pytest.mark.xdist_group("packages")


@pytest.mark.parametrize("name", ["dlrm", "two_tower"])  # of the five those that differ most
def test_a_package_is_its_model(name):
    """Batches of 0 to 512 bags, some empty, ids -1 and beyond the tables: the answers are the model's."""
    assert difference(name) <= LIMIT
