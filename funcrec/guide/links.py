"""Hooks that complete pages of the guide when mkdocs builds them: included texts, and links to the reference.

    {include funcrec/README.md names}   =  the text between `<!-- names -->` and `<!-- names: end -->` of that file
    `fr.lookup`                         =  a link to its docstring on pdoc's page

mkdocs calls `on_page_markdown` and `on_post_build`.
"""

import re
import types
from pathlib import Path
from typing import Any

import funcrec as fr

ROOT = Path(__file__).parents[2]
INCLUDE = re.compile(r"^\{include (\S+)(?: (\w+))?\}$", re.MULTILINE)
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!\[)`(?:fr\.)?([A-Za-z_][\w.]*)(\([^`]*\))?`(?!\])")
FILE = re.compile(r"\[(`?[^\]]+`?)\]\((?!https?:|#)[^)]*\.(?:py|md)(?:#[^)]*)?\)")  # of the repository, not of the site


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's text with the texts that it includes, and with links at names."""
    text = INCLUDE.sub(lambda found: included(found[1], found[2]), markdown)
    bare = page.file.src_uri == "reference.md"  # where names stand without `fr.`
    parts = FENCE.split(text)
    parts[::2] = [CODE.sub(lambda found: linked(found, bare), part) for part in parts[::2]]
    return "".join(parts)


def included(path: str, section: str | None) -> str:
    """Return the text of a file of the repository, or of a section; links to its files become their names."""
    text = (ROOT / path).read_text()
    if section is not None:
        text = text.split(f"<!-- {section} -->")[1].split(f"<!-- {section}: end -->")[0].strip()
    return FILE.sub(r"\1", text)


def linked(found: re.Match, bare: bool) -> str:
    """Return a link to the docstring, if the code is a public name or its call."""
    whole, name = found[0], found[1]
    address = address_of(name) if bare or whole.startswith("`fr.") else None
    return whole if address is None else f"[{whole}]({address})"


def address_of(name: str) -> str | None:
    """Return where pdoc has a public name: the page of its module, and its anchor."""
    value, module, own = fr, "funcrec", []
    for part in name.removesuffix(".").split("."):
        if part.startswith("_") or not hasattr(value, part) or (value is fr and part not in dir(fr)):
            return None
        value = getattr(value, part)
        if isinstance(value, types.ModuleType):
            module = f"{module}.{part}"
        else:
            own.append(part)
    module = "funcrec.kernels.ops" if module == "funcrec.kernels" else module  # its only page
    page = module.replace(".", "/") + ".html"
    return f"reference/{page}" + (f"#{'.'.join(own)}" if own else "")


def on_post_build(config: Any) -> None:
    """Write pdoc's pages next to the guide's."""
    import pdoc.render

    names = ["funcrec", "!funcrec.kernels", "!funcrec.guide", "!.*[.]_", "funcrec.kernels.ops"]
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*names, output_directory=Path(config["site_dir"]) / "reference")
