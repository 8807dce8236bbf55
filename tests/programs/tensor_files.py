"""Files of named tensors with another header or other bytes, under right checks."""

import json
import re
import zlib

BEGINNING = re.compile(rb'\A\{"__metadata__":\{"format":"[^"]*","crc32":"')


def parts(data):
    """Return (the content of the header, the bytes after the header)."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), bytearray(data[end:])


def text_of(content):
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def sealed(text, body=b"", align=8):
    """Return a file of a header's text and the bytes after the header. If the text has a CRC, the CRC is right."""
    text = text.ljust(-(-(8 + len(text)) // align) * align - 8)
    head, found = len(text).to_bytes(8, "little"), BEGINNING.match(text)
    if found and len(text) >= found.end() + 8:
        begin, rest = found.group(), text[found.end() + 8 :]
        text = begin + b"%08x" % zlib.crc32(head + begin + b"0" * 8 + rest) + rest
    return head + text + bytes(body)


def places(content):
    """Return {name: (begin, end)} of the tensors in their order, without padding."""
    found = {
        n: tuple(x["data_offsets"]) for n, x in content.items() if not n.startswith(("__padding__", "__metadata__"))
    }
    return dict(sorted(found.items(), key=lambda x: x[1]))


def checked(content, body):
    """Return the content with the CRCs of its tensors, computed from the bytes."""
    crcs = "".join(f"{zlib.crc32(body[begin:end]):08x}" for begin, end in places(content).values())
    content["__metadata__"]["crc32s"] = crcs
    return content


def changed(data, change, align=8):
    """Return the file after change(content, body), which may return another text of the header."""
    content, body = parts(data)
    made = change(content, body)
    return sealed(made if isinstance(made, bytes) else text_of(content), body, align)
