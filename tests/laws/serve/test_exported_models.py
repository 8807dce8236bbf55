"""Packages of models give the outputs of the models (programs.exported_models has all models)."""

import pytest
from programs.exported_models import LIMIT, difference

pytestmark = pytest.mark.xdist_group("packages")


# these two of the five models differ most
@pytest.mark.parametrize("name", ["dlrm", "two_tower"])
def test_a_package_is_its_model(name):
    """For batches of 0 to 512 bags, some of them empty, the package gives the model's outputs. Some ids are outside the
    tables, such as -1."""
    assert difference(name) <= LIMIT
