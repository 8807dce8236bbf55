"""Packages of models give the outputs of the models (programs.exported_models has all models)."""

import pytest
from programs.exported_models import LIMIT, difference

pytestmark = pytest.mark.xdist_group("packages")


def test_a_package_is_its_model():
    """For batches of 0 to 512 bags, some of them empty, a package of two models gives the models' outputs. Some ids are
    outside the tables, such as -1. These two of the five models differ most."""
    assert difference("dlrm", "two_tower") <= LIMIT
