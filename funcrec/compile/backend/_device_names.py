"""Compile packages without the regular expression by which torch's header reads the name of a device.

    regex_match("cpu:1", (cpu|cuda|xpu|mps)(:([0-9]+))?)  =  a comparison of four names, then digits

The templates of std::regex are half of what the compiler does for a package of a small model, and half of the object.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from funcrec.compile.backend._inductor import replaced

HEADERS = Path(__file__).parent / "headers"  # where the compiler finds <regex> first
KNOWN = (
    "#include <regex>",
    'std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");',
    "bool matched = std::regex_match(device_str, sm, re);",
)  # all lines of torch's headers that name a regular expression


@contextlib.contextmanager
def plain_device_names() -> Iterator[None]:
    """Return a context in which packages are compiled with the header of this folder, where torch's use is known."""
    from torch._inductor import cpp_builder

    if not is_known():
        yield
        return

    def first(options: Callable) -> Callable:
        def with_headers(*args, **kwargs):
            definitions, places, *rest = options(*args, **kwargs)
            return (definitions, [str(HEADERS), *places], *rest)

        return with_headers

    with replaced(cpp_builder, "get_cpp_torch_options", first):
        yield


@functools.cache
def is_known() -> bool:
    """Return whether torch's headers of packages use regular expressions for the names of devices alone."""
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "inductor"
    texts = [path.read_text() for path in sorted(folder.glob("aoti_*/*.h"))]
    return sorted(x.strip() for text in texts for x in text.splitlines() if "regex" in x) == sorted(KNOWN)
