"""A package behind the server answers as in Python, in both forms of bodies, whatever weights it has."""

import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from programs import answers, packages, serving

import funcrec as fr

pytestmark = pytest.mark.xdist_group("serving")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    packages.export(folder / "model")
    fr.save_weights(folder / "next", packages.params(1), version="next")
    return folder / "model"


@pytest.fixture(scope="module")
def running(path):
    program = os.environ.get("FUNCREC_SERVE") or answers.build() / "funcrec-serve"
    with serving.Server(program, path, "--updates", str(path.parent)) as server:
        yield server


def request(batch):
    """A batch as JSON has it."""
    lists = {k: batch.ids[k].to_lists() for k in packages.KEYS}
    jagged = batch.ids["seen"]
    ends, weights = jagged.offsets.tolist(), jagged.weights.tolist()
    seen = [weights[a:b] for a, b in pairwise(ends)]
    return {"ids": lists, "weights": {"seen": seen}, "dense": batch.dense.tolist()}


@pytest.mark.parametrize("version", ["first", "next"])
def test_the_server_answers_as_the_package(path, running, version):
    """Batches of 0 to 512 bags with ids in no table, as JSON and as bytes: Python's outputs within 1e-6, of the version
    that is named."""
    package = fr.load_package(path)
    if version == "next":
        package.swap(path.parent / "next")
        assert running.ask("POST", "/reload", {"weights": "next"})[0] == 200
    connection = running.connect()
    for num_bags in (0, 1, 3, 64, 512):
        batch = packages.batch(num_bags, seed=num_bags)
        want, asked = package(batch), request(batch)
        status, plain = serving.predict(connection, asked)
        body = serving.pack(asked, packages.KEYS, ("seen",))
        code, _, data = serving.ask(connection, "POST", "/predict", body, serving.BYTES)
        assert (status, code) == (200, 200)
        for answer in (plain, serving.unpack(data)):
            assert answer["version"] == version and set(answer["outputs"]) == set(want)
            for name, x in want.items():
                got = torch.as_tensor(np.array(answer["outputs"][name], dtype=np.float32)).reshape(x.shape)
                torch.testing.assert_close(got, x, rtol=0, atol=1e-6)
