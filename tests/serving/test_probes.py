"""A server's reports about itself, and the time that a request may wait."""

import json
import os
import signal
import threading

import pytest
from programs.serving import ONE, Server, ask, changed, everything, head, statuses

pytestmark = pytest.mark.xdist_group("serving")
BODY = json.dumps(ONE).encode()


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz"])
def test_a_server_that_ends_is_alive_and_not_ready(program, path):
    """A draining server is alive (200) but not ready (503)."""
    with Server(program, "sums", "--drain-s", "20") as server:
        assert server.ask("GET", path)[0] == 200
        with server.raw() as s:
            s.sendall(head(method="GET", path=path)[:-2])
            os.kill(server.process.pid, signal.SIGTERM)
            # the loop runs until the server accepts no connections
            while True:
                try:
                    server.raw().close()
                except ConnectionError:
                    break
            s.sendall(b"\r\n")
            assert statuses(s.recv(1000)) == [200 if path == "/livez" else 503]
        assert server.ended()[0] == 0


def test_a_full_queue_is_not_ready(program):
    """A server with a full queue is not ready. It is ready again when the queue is not full."""
    slow, over, seen = changed(["ids", "a"], [[901]]), threading.Event(), set()
    with Server(program, "sums", "--queue", "1") as server:

        def send():
            connection = server.connect()
            while not over.is_set():
                assert ask(connection, "POST", "/predict", slow)[0] in (200, 429)

        threads = [threading.Thread(target=send) for _ in range(4)]
        [t.start() for t in threads]
        for _ in range(2000):
            seen.add(server.ask("GET", "/readyz")[0])
            if 503 in seen:
                break
        over.set()
        [t.join() for t in threads]
        assert 503 in seen and server.ask("GET", "/readyz")[0] == server.ask("GET", "/livez")[0] == 200


def test_a_request_whose_time_is_over_is_not_run(program):
    """A request that waited longer than its Timeout-Ms gets 504 and is not run. Other requests are answered. An invalid
    time gets 400."""
    with Server(program, "sums") as server:

        def asked(time):
            return head(BODY, Timeout_Ms=time) + BODY

        with server.raw() as s:
            sent = b"".join(asked(x) for x in ("0", "60000", None, "0", "999999999"))
            s.sendall(sent + head(method="GET", path="/livez", Connection="close"))
            answer = everything(s)
        assert statuses(answer) == [504, 200, 200, 504, 200, 200]
        assert b"Timeout-Ms" in answer
        found = server.metrics()
        assert found["funcrec_batch_requests_sum"] == 3 and found["funcrec_queue_seconds_count"] == 5
        for time in ("x", "-1", "1.5", "", "1" * 10):
            with server.raw() as s:
                s.sendall(asked(time))
                s.shutdown(1)
                assert statuses(everything(s)) == [400]
        with server.raw() as s:
            s.sendall(asked("60000").replace(b"Timeout-Ms: 60000", b"Timeout-Ms: 0\r\nTimeout-Ms: 60000"))
            s.shutdown(1)
            assert b"`Timeout-Ms` is there twice" in everything(s)


def test_metrics_tell_of_the_process(program):
    """/metrics has the process metrics of Prometheus' clients, with the values that the system reports."""
    with Server(program, "sums", "--max-body", "100") as server:
        server.ask("POST", "/predict", ONE)
        found = {n: x for n, x in server.metrics().items() if n.startswith("process_")}
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) <= found["process_open_fds"] + 1
        assert found["process_open_fds"] <= found["process_max_fds"]
        assert 1e6 < found["process_resident_memory_bytes"] < found["process_virtual_memory_bytes"]
        assert found["process_cpu_seconds_total"] > 0 and found["process_start_time_seconds"] > 1.5e9


def test_the_manifest_tells_what_to_ask(server):
    """/manifest has the features, inputs, outputs, limits and version of the package."""
    status, headers, body = server.ask("GET", "/manifest")
    found = json.loads(body)
    assert (status, headers["Content-Type"], found["version"]) == (200, "application/json", "0")
    assert found["features"] == [
        {"name": "a", "rows": 1000, "weighted": False},
        {"name": "b", "rows": 1000, "weighted": True},
    ]
    assert found["inputs"][0] == {"name": "dense", "dtype": "float32", "shape": ["B", 3]}
    assert found["outputs"][1] == {"name": "ids", "dtype": "int64", "shape": ["B", 2]}
    assert (found["max_batch"], found["max_ids"]) == (512, 1 << 16)
