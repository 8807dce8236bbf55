"""Bodies of requests in JSON and bytes. Valid bodies are answered. Invalid bodies get the reason.

The model is the sums model."""

import json

import numpy as np
import pytest
from programs.serving import BYTES, ONE, Server, ask, changed, is_right, pack, predict, some_request

pytestmark = pytest.mark.xdist_group("serving")

BAD_JSON = [
    ("not JSON", b'{"ids": ', "is not JSON"),
    ("more than one value", b"{} {}", "is not JSON"),
    ("not UTF-8", b'{"\xff": 1}', "is not JSON"),
    ("too deep", b"[" * 2000, "`body` is not an object"),
    ("no object", b"[1]", "`body` is not an object"),
    ("an unknown key", changed(["label"], 1), "unknown key"),
    ("no ids", changed(["ids"], ...), "`ids` and the package differ"),
    ("ids that are no object", changed(["ids"], 3), "`ids` is not an object"),
    ("a key twice", json.dumps(ONE)[:-1].encode() + b', "dense": [[1, 2, 3]]}', "has a key twice"),
    (
        "a feature twice",
        json.dumps(ONE).replace('"b": [[2]]', '"b": [[2]], "\\u0061": [[3]]').encode(),
        "has a key twice",
    ),
    ("a deep id", changed(["ids", "a"], [[[[1]]]]), "is not an integer"),
    ("a bag that is an object", changed(["ids", "a"], [{}]), "`ids.a` is not a list"),
    ("dense that is an object", changed(["dense"], {}), "`dense` is not a list"),
    ("a feature short", changed(["ids", "b"], ...), "lacks a feature"),
    ("another feature", changed(["ids", "c"], [[1]]), "a feature that the package has not"),
    ("bags that are no list", changed(["ids", "a"], {}), "`ids.a` is not a list"),
    ("a bag that is no list", changed(["ids", "a"], [1]), "`ids.a` is not a list"),
    ("more bags in one", changed(["ids", "b"], [[1], [2]]), "another number of bags"),
    ("an id with a point", changed(["ids", "a"], [[1.0]]), "is not an integer"),
    ("an id that is a string", changed(["ids", "a"], [["1"]]), "is not an integer"),
    ("an id of 65 bits", changed(["ids", "a"], [[1 << 63]]), "is not an integer"),
    ("an id of 2000 bits", changed(["ids", "a"], [[10**600]]), "is not an integer"),
    ("a weight beyond f64", json.dumps(ONE).replace("0.5", "1e400", 1).encode(), "is not one of 32 bits"),
    # ^ Boost 1.81 refuses the exponent, and Boost 1.90 reads an infinite number
    ("a weight of a long exponent", json.dumps(ONE).replace("0.5", "1e99999999999", 1).encode(), "a number of"),
    ("too many bags", {"ids": {"a": [[]] * 513, "b": [[]] * 513}, "weights": {"b": []}, "dense": []}, "too many bags"),
    ("too many ids", changed(["ids", "a"], [[0] * 65537]), "too many ids"),
    ("no weights", changed(["weights"], ...), "lacks a feature whose ids have weights"),
    ("weights of others", changed(["weights", "a"], [[1]]), "with weights"),
    ("fewer weights", changed(["weights", "b"], [[]]), "does not match its ids"),
    ("fewer bags of weights", changed(["weights", "b"], []), "does not match its ids"),
    ("a weight that is none", changed(["weights", "b"], [[None]]), "is not one of 32 bits"),
    ("a weight beyond f32", changed(["weights", "b"], [[1e39]]), "is not one of 32 bits"),
    ("no dense", changed(["dense"], ...), "`dense` and the package differ"),
    ("a short row", changed(["dense"], [[1, 2]]), "another length"),
    ("more rows", changed(["dense"], [[1, 2, 3]] * 2), "another number of bags"),
]


@pytest.mark.parametrize(("body", "words"), [x[1:] for x in BAD_JSON], ids=[x[0] for x in BAD_JSON])
def test_bad_json_is_told_why(server, body, words):
    """An invalid body gets 400 with problem, got and need. The connection stays open."""
    connection = server.connect()
    status, _, answer = ask(connection, "POST", "/predict", body)
    error = json.loads(answer)["error"]
    assert status == 400 and words in error["problem"] and error["got"] and error["need"]
    assert predict(connection, ONE)[0] == 200


def test_an_id_beyond_64_bits_is_told_as_it_came(server):
    """An error about an integer of more than 64 bits has the integer's own digits and the valid range."""
    error = json.loads(server.ask("POST", "/predict", changed(["ids", "a"], [[1 << 63]]))[2])["error"]
    assert error["got"] == str(1 << 63) and "2^63 - 1" in error["need"]


def test_dense_of_no_columns(program):
    """A package without dense columns accepts empty rows or no rows. A number in a row gets 400."""
    with Server(program, "bare") as server:
        request = changed(["dense"], [[]])
        for asked in (request, changed(["dense"], ...)):
            status, answer = predict(server.connect(), asked)
            assert status == 200 and is_right(answer, request)
        for rows, said in (([[1]], "another length"), ([[], []], "another number of bags")):
            status, answer = predict(server.connect(), changed(["dense"], rows))
            assert status == 400 and said in answer["error"]["problem"]


def test_keys_come_in_any_order(server):
    """The server finds features, and the keys of the body, by name. Some ids may have weights."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        request = some_request(rng, bags=3)
        turned = {k: dict(reversed(v.items())) if k == "ids" else v for k, v in reversed(request.items())}
        status, answer = predict(server.connect(), turned)
        assert status == 200 and is_right(answer, request)


def test_an_unknown_feature_is_told_those_there_are(server):
    """An error about an unknown feature lists the package's features. An error about weights lists the weighted
    features."""
    for path, names in [(["ids", "c"], "a, b"), (["weights", "a"], "b")]:
        _, _, answer = server.ask("POST", "/predict", changed(path, [[1]]))
        assert json.loads(answer)["error"]["need"] == names


def at(position, value, body=None):
    body = bytearray(pack(ONE) if body is None else body)
    body[position : position + len(value)] = value
    return bytes(body)


BAD_BYTES = [
    ("nothing", b"", "is not a request"),
    ("no magic", at(0, b"FRQ2"), "is not a request"),
    ("another number of features", at(4, b"\x03"), "features and the package differ"),
    ("another number of columns", at(8, b"\x00"), "dense columns and the package differ"),
    ("no weights", at(12, b"\x00"), "weights follow and the package differ"),
    ("more bags than bytes", at(16, b"\x02"), "the bytes that the header tells of"),
    ("bags of 64 bits", at(16, b"\xff" * 8), "too many bags"),
    ("ids of 64 bits", at(24, b"\xff" * 8), "too many ids"),
    ("a byte short", pack(ONE)[:-1], "the bytes that the header tells of"),
    ("a byte more", pack(ONE) + b"x", "the bytes that the header tells of"),
    ("a long bag", at(44, b"\xff" * 4), "do not sum to the number of ids"),
    ("two long bags", at(44, b"\xff" * 8), "do not sum to the number of ids"),
]


@pytest.mark.parametrize(("body", "words"), [x[1:] for x in BAD_BYTES], ids=[x[0] for x in BAD_BYTES])
def test_bad_bytes_are_told_why(server, body, words):
    """Bytes that are not a request of this package get 400. Nothing after the body is read."""
    status, _, answer = server.ask("POST", "/predict", body, BYTES)
    assert (status, words in json.loads(answer)["error"]["problem"]) == (400, True)
