"""Several models and versions in one process, the way back to replaced weights, and the description of all paths."""

import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from programs.serving import ONE, Server, infer, is_right, predict, some_request

import funcrec as fr

pytestmark = pytest.mark.xdist_group("serving")


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    """Return a folder of weights `v1` to `v9` and deltas `d1` to `d9`, of versions 201 to 209."""
    root = tmp_path_factory.mktemp("updates")
    for n in range(1, 10):
        (root / f"v{n}").mkdir()
        (root / f"v{n}" / "version").write_text(str(n))
        (root / f"d{n}").write_text(str(200 + n))
    return root


@pytest.fixture(scope="module")
def several(program, updates):
    """A server of model `a` in versions 20 and 30, and of model `b` in version 40."""
    with Server(program, "a=sums-20", "a=sums-30", "b=sums-40", "--updates", str(updates)) as server:
        yield server


def get(server, path):
    status, _, body = server.ask("GET", path)
    return status, json.loads(body)


def post(server, path, /, **body):
    status, _, out = server.ask("POST", path, body)
    return status, json.loads(out)


def test_requests_reach_the_model_that_they_name(several):
    """A path names a model and a version; without a version the last one of its name answers, without a name the first
    model. Requests of many clients at once get the answers of theirs, in both protocols."""
    ways = {"": 30, "/models/a": 30, "/models/a/versions/20": 20, "/models/a/versions/30": 30, "/models/b": 40}

    def talk(seed):
        rng, connection = np.random.default_rng(seed), several.connect()
        for _ in range(30):
            way, request = str(rng.choice([*ways])), some_request(rng, bags=2)
            path = f"{way}/predict" if not way or rng.random() < 0.5 else f"/v2{way}/infer"
            body = json.dumps(request).encode()
            if path.startswith("/v2"):
                status, answer = infer(connection, request, path=path, binary=("dense",) if rng.random() < 0.5 else ())
            else:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                status, answer = reply.status, json.loads(reply.read())
            if status != 200 or int(answer["version"]) != ways[way] or not is_right(answer, request):
                return path, status, answer
        return None

    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(talk, range(6))] == [None] * 6
    assert get(several, "/models/b/healthz")[1]["version"] == "40" and get(several, "/healthz")[1]["version"] == "30"
    assert get(several, "/v2/models/a")[1]["versions"] == ["20", "30"]
    assert [m["name"] for m in get(several, "/models")[1]["models"]] == ["a", "a", "b"]
    assert several.metrics()['funcrec_version_info{model="b",version="40"}'] == 1


def test_what_is_not_served_is_not_found(several):
    """An unknown model or version gets 404, which lists those that are served."""
    for path in ("/models/c/predict", "/models/a/versions/40/predict", "/models/b/versions/30/predict"):
        status, answer = post(several, path, **ONE)
        assert status == 404 and "b, version 40" in answer["error"]["need"]
    for path in (
        "/models/a/metrics",
        "/models/a/models",
        "/models/a/v2",
        "/models/a",
        "/models/a/versions/20",
        "/models//predict",
    ):
        assert several.ask("GET", path)[0] == 404


def test_an_update_changes_one_model(several):
    """Weights, deltas and the way back change the model and version that the path names, and no other."""
    assert post(several, "/models/a/versions/20/reload", weights="v2") == (200, {"version": "2"})
    assert get(several, "/v2/models/a")[1]["versions"] == ["2", "30"]
    assert post(several, "/models/b/delta", path="d4") == (200, {"version": "204"})
    assert post(several, "/models/a/versions/20/reload", weights="v3")[0] == 404
    assert post(several, "/models/a/versions/2/rollback", version="20") == (200, {"version": "20"})
    assert (
        get(several, "/v2/models/a")[1]["versions"] == ["20", "30"]
        and post(several, "/rollback", version="20")[0] == 400
    )
    assert several.ask("POST", "/models/b/reload", {"weights": "nothing"})[0] == 400
    with contextlib.closing(several.connect()) as connection:  # at the address of requests
        connection.request("POST", "/models/b/rollback", b'{"version": "40"}', {"Content-Type": "application/json"})
        assert connection.getresponse().status == 403


def test_a_publisher_updates_one_model(program, tmp_path):
    """`fr.update_server` at the address of a model brings this model, and no other, to the newest weights."""
    newest = tmp_path / "0000000001-step-1-aaaaaa.weights"
    newest.mkdir()
    (newest / "version").write_text("7")
    with Server(program, "a=sums", "b=sums-40", "--updates", str(tmp_path)) as server:
        assert fr.update_server(f"http://127.0.0.1:{server.admin}/models/b", tmp_path) == "7"
        assert [m["version"] for m in get(server, "/models")[1]["models"]] == ["0", "7"]
        with pytest.raises(ConnectionError, match="404"):
            fr.update_server(f"http://127.0.0.1:{server.admin}/models/c", tmp_path)


def test_one_request_goes_back(program, updates):
    """/rollback takes the weights that /reload replaced, and keeps those that it replaces. Asked twice it goes back
    once. A version that is not kept gets 400 and changes nothing; a delta keeps no weights."""
    with Server(program, "sums", "--updates", str(updates)) as server:
        status, answer = post(server, "/rollback", version="1")
        assert status == 400 and answer["error"]["got"] == "1"
        assert post(server, "/delta", path="d1")[0] == 200
        assert get(server, "/models")[1]["models"][0]["kept"] is None
        for n in (1, 2):
            assert post(server, "/reload", weights=f"v{n}")[0] == 200
        assert [post(server, "/rollback", version=v)[0] for v in ("201", "", "3")] == [400] * 3
        for version in ("1", "1", "2", "1"):
            assert post(server, "/rollback", version=version) == (200, {"version": version})
            assert predict(server.connect(), ONE)[1]["version"] == version
        assert get(server, "/models")[1]["models"][0]["kept"] == "2"
        assert server.metrics()['funcrec_kept_version_info{version="2"}'] == 1
        assert server.metrics()['funcrec_reloads_total{what="rollback",result="ok"}'] == 4
        assert server.ask("POST", "/rollback", {"version": 1})[0] == 400
    with Server(program, "sums", "--updates", str(updates), "--keep", "false") as server:
        assert post(server, "/reload", weights="v1")[0] == 200
        assert post(server, "/rollback", version="0")[0] == 400


def test_all_paths_are_described(server):
    """/openapi.json describes each path that the server has, with the methods that it has, and no other. All of its
    references lead somewhere, and operations have names of their own."""
    status, found = get(server, "/openapi.json")
    assert status == 200 and found["openapi"].startswith("3.0.")
    names = []
    for path, item in found["paths"].items():
        own = path.replace("{model}", "sums").replace("{version}", "0")
        ((verb, operation),) = [(v, x) for v, x in item.items() if v != "parameters"]
        names.append(operation["operationId"])
        allowed = (
            server.ask("DELETE", own)[1]["Allow"] if not own.endswith(("/reload", "/delta", "/rollback")) else "POST"
        )
        assert allowed == ("POST" if verb == "post" else "GET, HEAD"), path
        assert len(item.get("parameters", [])) == path.count("{"), path
        if verb == "get":
            assert server.ask("GET", own)[0] == 200
    assert len(names) == len(set(names))
    told = json.loads(server.ask("GET", "/x")[2])["error"]["need"]
    assert {p for p in re.findall(r"/[\w.]+", told) if p != "/v2"} <= {*found["paths"], "/NAME"}
    for at in re.findall(r'"#/([^"]*)"', json.dumps(found)):
        part = found
        for key in at.split("/"):
            part = part[key]
