"""A few thousand hostile requests to the server. programs/fuzz_server.py sends more requests, to a build with
sanitizers."""

import pytest
from programs import fuzz_server
from programs.serving import Server

pytestmark = pytest.mark.xdist_group("serving")


def test_hostile_requests_harm_no_neighbour(program):
    """Good requests between hostile requests get right responses. The server keeps running and stops with status 0."""
    with Server(program, "sums", "--workers", "2", "--timeout-s", "2", "--max-body", "100000") as server:
        sent, seen, wrong = fuzz_server.run(server, 3000, first=7 << 32)
        assert wrong == [] and sent >= 3000 and seen > 300
        codes = [int(name.split('"')[1]) for name in server.metrics() if "requests_total" in name]
        assert {200, 400, 404, 405, 413, 415, 500} <= {*codes}
        assert server.stop() == (0, "")
