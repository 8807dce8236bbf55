"""Updates of a running server to the newest weights of a folder, over HTTP.

GET /healthz returns the version of the server. POST /reload and /delta send the files that the server lacks.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from funcrec.core import PositiveMagnitude, Within, fail, typed
from funcrec.files import Url, path_or_url
from funcrec.serve.freshness._published import follow

CALL = "funcrec.update_server"
MOST = 1 << 20  # the most bytes of an answer that are read
UNIX = "unix:"
FORMS = "http:// or https://, a host, and a port below 65536, or unix: and the path of a socket"
Address = Annotated[str, Within(FORMS, lambda text: is_address(text), "is not an address")]


@typed
def update_server(address: Address, folder: str | os.PathLike[str], *, timeout_s: PositiveMagnitude = 10.0) -> str:
    """Return the version of a running `funcrec-serve` after it gets the files of `publish` that it lacks.

    These are the deltas after its version, in their order, or whole weights and the deltas after them.

    Args:
      address: the address of the server's `--admin`: "http://127.0.0.1:8081", or "unix:/run/admin" for the socket at
        this path; "http://127.0.0.1:8081/models/NAME" for one model of several. The request goes to it directly. Proxy
        settings of this process do not apply.
      folder: the folder of `publish`, which the server reads as its `--updates`.
      timeout_s: how long to wait for each answer.

    Returns:
      the version that the server has afterwards.

    Raises:
      ConnectionError: if the server does not answer, or reports an error of its own.
      ValueError: if the server refuses a file. The error has the message of the server.
      FileNotFoundError: if the folder has no weights.

    Example:
      >>> import tempfile, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     fr.update_server("http://127.0.0.1:9", folder)
      Traceback (most recent call last):
          ...
      ConnectionError: funcrec.update_server: http://127.0.0.1:9/healthz was not answered.
        got   [Errno 111] Connection refused
        need  a running server
        try   python -m funcrec serve PATH --updates FOLDER --admin PORT
    """
    address = address.rstrip("/")

    def take(path: Path) -> None:
        where, key = ("reload", "weights") if path.is_dir() else ("delta", "path")
        ask(f"{address}/{where}", timeout_s, {key: path.name})

    where = path_or_url(CALL, folder, "folder")
    if isinstance(where, Url):
        need, hint = "the folder that it reads as its --updates", "package.follow(url), in Python"
        fail(CALL, "a server reads no store.", got=f"{where}", need=need, hint=hint)
    follow(CALL, where, ask(f"{address}/healthz", timeout_s)["version"], take)
    return ask(f"{address}/healthz", timeout_s)["version"]


def ask(url: str, timeout_s: float, body: Any = None) -> dict[str, Any]:
    """Return the answer of a server. Raise ValueError with the message of the server if the request is at fault."""
    from http.client import HTTPException

    hint = "python -m funcrec serve PATH --updates FOLDER --admin PORT"
    try:
        status, text = exchange(url, timeout_s, None if body is None else json.dumps(body).encode())
        found = json.loads(text) if status == 200 else None
        if status == 200 and not (isinstance(found, dict) and isinstance(found.get("version"), str)):
            raise ValueError(f"no version in {found!r:.200}")
    except (OSError, HTTPException, ValueError) as error:
        got = str(getattr(error, "reason", error)) or type(error).__name__
        fail(CALL, f"{url} was not answered.", got=got, need="a running server", hint=hint, kind=ConnectionError)
    if found is not None:
        return found
    kind = ConnectionError
    if status == 400:
        hint, kind = "whole weights: fr.publish writes them after every `keep` deltas", ValueError
    what = f"{url} refused." if body is None else f"{url} refused {body}."
    got = f"{status} {text.decode(errors='replace').strip():.500}"
    fail(CALL, what, got=got, need="200", hint=hint, kind=kind)


def exchange(url: str, timeout_s: float, body: bytes | None) -> tuple[int, bytes]:
    """Return (status, body) of the answer to a GET without a body, or to a POST with a body."""
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    head = {"Content-Type": "application/json"}
    if url.startswith(UNIX):
        socket, path = url.removeprefix(UNIX).rsplit("/", 1)
        return over_unix(socket, path, timeout_s, body, head)
    try:
        with build_opener(ProxyHandler({})).open(Request(url, body, head), timeout=timeout_s) as reply:
            return reply.status, reply.read(MOST)
    except HTTPError as error:
        return error.code, error.read(MOST)


def over_unix(path: str, name: str, timeout_s: float, body: bytes | None, head: dict) -> tuple[int, bytes]:
    """Return the result of `exchange` over the socket at `path`."""
    import socket
    from http.client import HTTPConnection

    connection = HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(timeout_s)
        connection.sock.connect(path)
        connection.request("GET" if body is None else "POST", f"/{name}", body, head)
        reply = connection.getresponse()
        return reply.status, reply.read(MOST)
    finally:
        connection.close()


def is_address(text: str) -> bool:
    """Return whether the text is an address: scheme, host, port and path, or the path of a socket.

    An address has no user and nothing after the path, because names are appended to it.
    """
    if text.startswith(UNIX):
        return text.removeprefix(UNIX).startswith("/") and "\0" not in text
    try:
        found = urlsplit(text)
        is_server = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # a port that is no number, or an open bracket
        return False
    is_bare = not (found.query or found.fragment or "@" in found.netloc)
    return is_server and is_bare and text.isprintable() and " " not in text
