"""A server with the part of Hugging Face's HTTP interface that HfFileSystem uses for one data set, `user/data`.

    python tests/programs/hub.py PORT

Every write is a commit with the files' content in it, as of small files: it answers no upload by LFS or Xet. It was
written by what the client sends, so it shows that the client is used well, and nothing about the service.
"""

import base64
import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote

FILES: dict[str, bytes] = {}
COMMITS: list[str] = []
REPO = "datasets/user/data"


def digest(data):
    return hashlib.sha1(data).hexdigest()


def sha():
    return digest(str(len(COMMITS)).encode())


def file_entry(path):
    return {"type": "file", "path": path, "size": len(FILES[path]), "oid": digest(FILES[path])}


def folder_entry(path):
    return {"type": "directory", "path": path, "size": 0, "oid": digest(path.encode())}


def tree(top, is_deep):
    """Return the entries below a folder."""
    before = f"{top}/" if top else ""
    rest = [path.removeprefix(before) for path in sorted(FILES) if path.startswith(before)]
    cuts = [x.split("/") for x in rest]
    folders = {"/".join(x[:i]) for x in cuts for i in range(1, len(x) if is_deep else min(2, len(x)))}
    own = [file_entry(before + x) for x in rest if is_deep or "/" not in x]
    return [folder_entry(before + x) for x in sorted(folders)] + own


def commit(lines):
    for line in lines:
        x = json.loads(line)
        if x["key"] == "file":
            FILES[x["value"]["path"]] = base64.b64decode(x["value"]["content"])
        elif x["key"] == "deletedFile":
            FILES.pop(x["value"]["path"], None)
    COMMITS.append(sha())
    return {
        "success": True,
        "commitOid": sha(),
        "commitUrl": f"http://127.0.0.1/{REPO}/commit/{sha()}",
        "hookOutput": "",
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, code, content=b"", **head):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        kind = "application/octet-stream" if data is content else "application/json"
        for name, value in {"Content-Type": kind, **head, "Content-Length": str(len(data))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, what="EntryNotFound"):
        self.answer(404, {"error": what}, X_Error_Code=what)

    def do_GET(self):
        path, _, query = self.path.partition("?")
        path = unquote(path)
        if re.fullmatch(rf"/api/{REPO}(/revision/main)?", path):
            about = {"id": "user/data", "sha": sha(), "siblings": [], "private": False, "tags": []}
            self.answer(200, about | {"downloads": 0, "likes": 0})
        elif found := re.fullmatch(rf"/api/{REPO}/tree/main/?(.*)", path):
            own = tree(found[1].strip("/"), parse_qs(query).get("recursive", ["false"])[0].lower() == "true")
            self.answer(200, own) if own or not found[1] else self.missing()
        elif found := re.fullmatch(rf"/{REPO}/resolve/main/(.*)", path):
            self.content(found[1]) if found[1] in FILES else self.missing()
        else:
            self.missing("RepoNotFound")

    def content(self, path):
        data = FILES[path]
        head = {"ETag": f'"{digest(data)}"', "X_Repo_Commit": sha(), "Accept_Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not wanted:
            self.answer(200, data, **head)
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if first >= len(data):
            self.answer(416, b"", Content_Range=f"bytes */{len(data)}")
            return
        self.answer(206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}", **head)

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        path, body = unquote(self.path.partition("?")[0]), self.body()
        if path == f"/api/{REPO}/paths-info/main":
            is_json = body.startswith(b"{")
            paths = json.loads(body)["paths"] if is_json else parse_qs(body.decode()).get("paths", [])
            files = [file_entry(p) for p in paths if p in FILES]
            self.answer(200, files + [folder_entry(p) for p in paths if any(x.startswith(f"{p}/") for x in FILES)])
        elif path == f"/api/{REPO}/preupload/main":
            how = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self.answer(200, {"files": [{"path": x["path"], **how} for x in json.loads(body)["files"]]})
        elif path == f"/api/{REPO}/commit/main":
            self.answer(200, commit(body.splitlines()))
        else:
            self.missing("RepoNotFound")

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        out = b""
        while count := int(self.rfile.readline(), 16):
            out += self.rfile.read(count)
            self.rfile.readline()
        self.rfile.readline()
        return out


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
