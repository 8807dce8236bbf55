"""The Open Inference Protocol: answers as those of /predict, what clients find out, and what is refused."""

import json

import numpy as np
import pytest
from programs import serving
from programs.serving import BYTES, JSON, ONE, Server, ask, infer, infer_body, is_right, some_request, tensors

pytestmark = pytest.mark.xdist_group("serving")
INFER = "/v2/models/sums/infer"
NAMES = ("ids.a.values", "ids.a.lengths", "ids.b.values", "ids.b.lengths", "weights.b", "dense")
OUTPUTS = ("score", "ids")


def test_the_protocol_answers_as_predict_does(server):
    """Tensors in lists, in bytes or both get the outputs of the sums model, in any order of inputs, with any choice and
    order of outputs, each in lists or in bytes; the answer has the request's id."""
    rng, connection = np.random.default_rng(0), server.connect()
    for turn in range(80):
        request = some_request(rng, bags=int(rng.integers(1, 5)) if turn % 8 else 0)
        binary = {n for n in NAMES if rng.random() < 0.5}
        whole = tensors(request)
        order = rng.permutation(list(whole)).tolist()
        asked = rng.permutation(OUTPUTS)[: rng.integers(1, 3)].tolist()
        more = {"id": f"n{turn}"} if turn % 2 else {}
        if turn % 3:
            more["outputs"] = [{"name": n, "parameters": {"binary_data": bool(rng.random() < 0.5)}} for n in asked]
        if turn % 5 == 0:
            more["parameters"] = {"binary_data_output": True, "timeout": 10**7}
        body, size = infer_body({n: whole[n] for n in order}, binary, **more)
        fields = {"Inference_Header_Content_Length": str(size)} if binary else {}
        status, headers, out = ask(connection, "POST", INFER, body, BYTES if binary else JSON, **fields)
        assert status == 200, out
        answer = serving.read_inference(out, headers.get(serving.HEADER))
        assert (answer["model"], answer["id"]) == ("sums", more.get("id"))
        if turn % 3:
            assert list(answer["outputs"]) == asked
            want = serving.expected(request)["outputs"]
            assert all(x.tolist() == want[n] for n, x in answer["outputs"].items())
        else:
            assert is_right(answer, request)
        in_bytes = json.loads(out[: int(headers.get(serving.HEADER, len(out)))])["outputs"]
        assert (headers["Content-Type"] == BYTES) == any("parameters" in x for x in in_bytes)


def test_dense_rows_may_be_one_list_or_rows(server):
    """A dense tensor may be one list of numbers, or a list of rows."""
    whole, connection = tensors(ONE), server.connect()
    for data in ([0, 0, 0.5], [[0, 0, 0.5]]):
        body = json.loads(infer_body(whole)[0])
        body["inputs"][-1]["data"] = data
        status, _, out = ask(connection, "POST", INFER, body)
        assert status == 200 and is_right(serving.read_inference(out, None), ONE)


def test_clients_find_out_what_they_need(server):
    """The metadata name each input with its datatype and shape, the feature and what it holds, and say how jagged ids
    are tensors; the health paths and the server's own metadata answer as the protocol says."""
    get = lambda path: (lambda got: (got[0], json.loads(got[2])))(server.ask("GET", path))
    assert get("/v2/health/live") == (200, {"live": True})
    assert get("/v2/health/ready") == (200, {"ready": True})
    assert get("/v2/models/sums/ready") == (200, {"name": "sums", "ready": True})
    status, found = get("/v2")
    assert status == 200 and found["extensions"] == ["binary_tensor_data"] and found["name"] == "funcrec-serve"
    status, found = get("/v2/models/sums")
    assert status == 200 and found == get("/v2/models/sums/versions/0")[1]
    assert (found["name"], found["versions"], found["platform"]) == ("sums", ["0"], "funcrec")
    whole = tensors(ONE)
    assert [x["name"] for x in found["inputs"]] == list(NAMES) and {*whole} == {*NAMES}
    for x in found["inputs"]:
        own = whole[x["name"]]
        assert np.dtype("<" + serving.DATATYPES[x["datatype"]]) == own.dtype and len(x["shape"]) == own.ndim
        assert all(size in (-1, n) for size, n in zip(x["shape"], own.shape, strict=True))
        assert x["parameters"]["holds"] in ("values", "lengths", "weights", "dense")
    assert [(x["name"], x["datatype"], x["shape"]) for x in found["outputs"]] == [
        ("score", "FP32", [-1]), ("ids", "INT64", [-1, 2])]  # fmt: skip
    assert "ids.F.lengths" in found["parameters"]["jagged"] and found["parameters"]["max_batch"] == 512


def with_input(name, /, **entries):
    """Return the body of ONE whose input `name` has other entries. The value `...` removes an entry."""
    body = json.loads(infer_body(tensors(ONE))[0])
    own = next(x for x in body["inputs"] if x["name"] == name)
    own.update(entries)
    for key in [k for k, x in own.items() if x is ...]:
        del own[key]
    return body


def with_body(**entries):
    return {**json.loads(infer_body(tensors(ONE))[0]), **entries}


REFUSED = {
    "not JSON": (b"{", "is not JSON"),
    "a list": ([], "`body`"),
    "no inputs": ({}, "no `inputs`"),
    "an unknown key": (with_body(model="x"), "`model` is not a key"),
    "an unknown parameter": (with_body(parameters={"priority": 1}), "priority"),
    "a parameter of another kind": (with_body(parameters={"timeout": "1"}), "parameters.timeout"),
    "a time below 0": (with_body(parameters={"timeout": -1}), "parameters.timeout"),
    "a number as the id": (with_body(id=1), "`id`"),
    "a long id": (with_body(id="x" * 1001), "1001 bytes"),
    "an unknown output": (with_body(outputs=[{"name": "x"}]), "no such output"),
    "an output twice": (with_body(outputs=[{"name": "ids"}] * 2), "twice"),
    "classes": (with_body(outputs=[{"name": "ids", "parameters": {"classification": 2}}]), "classification"),
    "an unknown input": (with_input("dense", name="x"), "no such input"),
    "an input twice": (with_input("dense", name="weights.b"), "there twice"),
    "an input that lacks": (with_body(inputs=with_body()["inputs"][:-1]), "no dense"),
    "too many inputs": (with_body(inputs=with_body()["inputs"] * 2), "too many inputs"),
    "another dtype": (with_input("ids.a.values", datatype="INT32"), "INT64"),
    "no dtype": (with_input("dense", datatype=...), "datatype"),
    "no shape": (with_input("dense", shape=...), "no shape"),
    "no data": (with_input("dense", data=...), "binary_data_size"),
    "both kinds of data": (with_input("dense", parameters={"binary_data_size": 4}), "`data` and"),
    "another rank": (with_input("dense", shape=[3]), "[B, 3]"),
    "other columns": (with_input("dense", shape=[1, 2], data=[0, 1]), "[B, 3]"),
    "rows of other lengths": (with_input("dense", data=[[0, 1], [2]]), "1 rows"),
    "a row of another length": (with_input("dense", data=[[0, 1, 2], []], shape=[2, 3]), "3"),
    "a number among rows": (with_input("dense", data=[[0, 1], 2]), "`inputs[5].data`"),
    "a row among numbers": (with_input("dense", data=[0, [1, 2]]), "`inputs[5].data`"),
    "rows of rows": (with_input("dense", data=[[[0, 1, 2]]]), "`inputs[5].data`"),
    "ids in rows": (with_input("ids.a.values", data=[[1]]), "one list"),
    "fewer numbers than the shape": (with_input("ids.a.values", data=[]), "0 numbers"),
    "a size below 0": (with_input("ids.a.values", shape=[-1]), "shape"),
    "a huge size": (with_input("ids.a.values", shape=[1 << 40]), "at most"),
    "a huger size": (with_input("ids.a.values", shape=[1 << 62]), "shape"),
    "many dimensions": (with_input("ids.a.values", shape=[1] * 9), "8 or fewer"),
    "an id with a point": (with_input("ids.a.values", data=[1.0]), "INT64"),
    "a text among ids": (with_input("ids.a.values", data=["1"]), "`inputs[0].data`"),
    "null among numbers": (with_input("dense", data=[0, None, 1]), "null"),
    "a length of 64 bits": (with_input("ids.a.lengths", data=[(1 << 32) + 1]), "32 bits"),
    "a length below 0": (with_input("ids.a.lengths", data=[-1]), "below 0"),
    "lengths that do not sum up": (with_input("ids.a.lengths", data=[2]), "does not sum"),
    "weights that do not match": (with_input("weights.b", shape=[2], data=[1, 2]), "does not match"),
    "a number that f32 lacks": (with_input("weights.b", data=[1e39]), "FP32"),
    "another number of bags": (with_input("ids.b.lengths", shape=[2], data=[1, 0]), "number of bags"),
    "bytes that the body lacks": (with_input("dense", data=..., parameters={"binary_data_size": 12}), "ends before"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(server, name):
    """A request that does not fit gets 400 and the protocol's error: one text with what is wrong, got and needed."""
    body, part = REFUSED[name]
    status, _, out = server.ask("POST", INFER, body)
    found = json.loads(out)
    assert status == 400 and [*found] == ["error"], out
    assert part in found["error"] and "\n  got   " in found["error"] and "\n  need  " in found["error"]


def test_bytes_that_do_not_fit_are_refused(server):
    """Lengths of the JSON and of tensors that do not fit the body get 400: longer, shorter, not a number, twice."""
    body, size = infer_body(tensors(ONE), NAMES)
    send = lambda body, size: infer_status(server, body, size)
    assert send(body, size) == 200
    assert [send(body, s) for s in (size - 1, size + 1, len(body) + 1, 0, "x", "", "-1", "1" * 11)] == [400] * 8
    assert send(body[:-1], size) == send(body + b"x", size) == 400
    whole = json.loads(body[:size])
    whole["inputs"][0]["parameters"]["binary_data_size"] = 7
    text = json.dumps(whole).encode()
    assert send(text + body[size:-1], len(text)) == 400
    twice = serving.head(body, path=INFER, Content_Type=BYTES, Connection="close")[:-2]
    with server.raw() as s:
        s.sendall(twice + b"Inference-Header-Content-Length: %d\r\n" % size * 2 + b"\r\n" + body)
        assert serving.statuses(serving.everything(s)) == [400]


def infer_status(server, body, size):
    connection = server.connect()
    status, _, _ = ask(connection, "POST", INFER, body, BYTES, Inference_Header_Content_Length=str(size))
    connection.close()
    return status


def test_refusals_have_the_protocols_form(server):
    """An unknown model, version or path of the protocol, a wrong method or type, and a body that is too long get an
    error that is one text. Clients that name no type are answered."""
    body = infer_body(tensors(ONE))[0]
    for method, path, code in (
        ("GET", "/v2/models/x", 404), ("GET", "/v2/models/sums/versions/1", 404), ("POST", "/v2/models/x/infer", 404),
        ("POST", "/v2/models/sums/versions/x/infer", 404), ("GET", INFER, 405), ("GET", "/v2/models", 404),
        ("GET", "/v2/models/", 404), ("GET", "/v2/models/%zz", 404), ("GET", "/v2/models/sums/predict", 404),
        ("GET", "/v2/models/sums/versions/", 404), ("GET", "/v2x", 404),
    ):  # fmt: skip
        status, _, out = server.ask(method, path, body if method == "POST" else None)
        assert status == code and isinstance(json.loads(out)["error"], str), path
    assert server.ask("POST", INFER, body, "text/plain")[0] == 415
    assert server.ask("POST", INFER, b" " * ((16 << 20) + 1))[0] == 413
    assert server.ask("GET", "/v2/models/su%6ds/ready")[0] == 200
    with server.raw() as s:
        s.sendall(serving.head(body, path=INFER, Content_Type=None, Connection="close") + body)
        assert serving.statuses(serving.everything(s)) == [200]


def test_a_model_without_dense_columns_has_no_dense_input(program):
    """A model without dense columns lists no input `dense`, and refuses one."""
    with Server(program, "bare") as server:
        found = json.loads(server.ask("GET", "/v2/models/bare")[2])
        assert [x["name"] for x in found["inputs"]] == list(NAMES[:-1])
        request = {k: x for k, x in ONE.items() if k != "dense"}
        status, answer = infer(server.connect(), request, path="/v2/models/bare/infer")
        assert status == 200 and answer["outputs"]["score"].tolist() == [3.0]
        assert infer(server.connect(), ONE, path="/v2/models/bare/infer")[0] == 400


def test_a_time_that_is_over_ends_the_request(server):
    """`timeout`, in microseconds, ends a request that waits longer for a worker: 504. 0 sets no limit."""
    assert [infer(server.connect(), ONE, parameters={"timeout": t})[0] for t in (1, 0)] == [504, 200]
