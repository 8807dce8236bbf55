"""What an editor shows of the programs of the README and the guide, asked of a language server at each name.

    PYTHONPATH=tests .venv/bin/python -m programs.editor        two minutes; kept in bench/results/EDITOR.txt

Counts for each page the dots after which the used member is listed, and the calls whose arguments are shown. It names
each dot that lists nothing, and each variable whose type is not known.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from programs.pages import blocks_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "funcrec" / "guide" / "pages").glob("*.md"))]
BLIND = re.compile(r"\((\.\.\.|\*args[^,]*, \*\*kwargs[^,]*)\).*")  # a signature that names no argument
VAGUE = re.compile(r"\b(Any|Unknown)\b")


class Editor:
    """A language server that a program asks, as an editor does."""

    def __init__(self, folder: Path):
        command = [Path(sys.executable).parent / "basedpyright-langserver", "--stdio"]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)
        self.count, self.uri = 0, ""
        folders = [{"uri": folder.as_uri(), "name": "pages"}]
        asked = {"processId": os.getpid(), "rootUri": folder.as_uri(), "workspaceFolders": folders}
        plain = {"hover": {"contentFormat": ["plaintext"]}, "signatureHelp": {}, "completion": {}}
        self.ask("initialize", asked | {"capabilities": {"textDocument": plain}})
        self.send({"method": "initialized", "params": {}})

    def send(self, message: dict[str, Any]) -> None:
        data, stream = json.dumps({"jsonrpc": "2.0"} | message).encode(), self.server.stdin
        assert stream is not None
        stream.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        stream.flush()

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        """Return the server's answer. What the server asks meanwhile gets no settings."""
        self.count += 1
        self.send({"id": self.count, "method": method, "params": params})
        while True:
            message = self.read()
            if "method" in message and "id" in message:
                items = message["params"].get("items", []) if message["method"] == "workspace/configuration" else None
                self.send({"id": message["id"], "result": items and [{}] * len(items)})
            elif message.get("id") == self.count and "method" not in message:
                return message.get("result")

    def read(self) -> dict[str, Any]:
        stream, size = self.server.stdout, 0
        assert stream is not None
        while line := stream.readline().strip():
            size = int(line.split(b":")[1]) if line.lower().startswith(b"content-length") else size
        assert size, "the server has ended"
        return json.loads(stream.read(size))

    def open(self, path: Path) -> None:
        self.uri = path.as_uri()
        text = {"uri": self.uri, "languageId": "python", "version": 1, "text": path.read_text()}
        self.send({"method": "textDocument/didOpen", "params": {"textDocument": text}})

    def at(self, method: str, line: int | None, column: int) -> Any:
        assert line is not None
        place = {"textDocument": {"uri": self.uri}, "position": {"line": line - 1, "character": column}}
        return self.ask(f"textDocument/{method}", place)

    def members(self, node: ast.Attribute) -> set[str]:
        """Return the names that the editor lists after a dot."""
        found = self.at("completion", node.end_lineno, (node.end_col_offset or 0) - len(node.attr)) or []
        return {item["label"] for item in (found["items"] if isinstance(found, dict) else found)}

    def signatures(self, node: ast.Call) -> list[str]:
        found = self.at("signatureHelp", node.func.end_lineno, (node.func.end_col_offset or 0) + 1) or {}
        return [s["label"] for s in found.get("signatures", [])]

    def hover(self, node: ast.Name) -> str:
        found = self.at("hover", node.lineno, node.col_offset)
        contents = found["contents"] if found else ""
        text = contents["value"] if isinstance(contents, dict) else str(contents)
        return " ".join(text.split("\n\n")[0].split())


def report(editor: Editor, path: Path) -> None:
    """Print what the editor shows of a page's program."""
    editor.open(path)
    nodes = list(ast.walk(ast.parse(path.read_text())))
    dots, calls = ([n for n in nodes if isinstance(n, kind)] for kind in (ast.Attribute, ast.Call))
    names = [n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    silent = [n for n in dots if n.attr not in editor.members(n)]
    blind = [n for n in calls if not (shown := editor.signatures(n)) or all(map(BLIND.fullmatch, shown))]
    vague = [f"{n.lineno}: {text[:100]}" for n in names if VAGUE.search(text := editor.hover(n)) or not text]
    count = lambda bad, all_of: f"{len(all_of) - len(bad)} of {len(all_of)}"
    said = f"{count(silent, dots)} dots list the member, {count(blind, calls)} calls show arguments"
    print(f"{path.stem}: {said}, {count(vague, names)} variables have types", flush=True)
    for kind, found in (("dot", silent), ("call", blind)):
        for n in found:
            print(f"    {kind} {n.lineno}: {ast.unparse(n if kind == 'dot' else n.func)[-90:]}")
    for text in vague:
        print(f"    variable {text}")


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root).resolve()
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / "funcrec", folder / "funcrec", ignore=ignored)
        shutil.copytree(ROOT / "kernels", folder / "funcrec" / "kernels", ignore=ignored)
        pages = {p.stem: "".join(blocks_of(p.read_text())) for p in PAGES}
        paths = [folder / f"{name}.py" for name, code in pages.items() if code]
        for path in paths:
            path.write_text(pages[path.stem])
        editor = Editor(folder)
        for path in paths:
            report(editor, path)
        editor.server.terminate()


if __name__ == "__main__":
    main()
