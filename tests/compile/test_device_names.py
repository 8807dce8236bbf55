"""Packages are compiled with a header that reads a device's name as the regular expression of torch's header does."""

import re
import subprocess

from torch._inductor.cpp_builder import get_cpp_compiler

from funcrec.compile.backend import _device_names

READER = """
#include <regex>
#include <iostream>
int main() {
  std::regex re("");
  std::string line;
  while (std::getline(std::cin, line)) {
    std::smatch found;
    std::cout << (std::regex_match(line, found, re) ? "yes " : "no ");
    std::cout << found[3].matched << " " << found[1].str() << " " << found[3].str() << "\\n";
  }
}
"""
DEVICES = ("cpu", "cuda", "xpu", "mps")
OTHERS = (
    "",
    "CPU",
    "cpu ",
    " cpu",
    "cp",
    "cpus",
    "meta",
    "cpu:1 ",
    "cuda:1:2",
    ":1",
    "1",
    "cpucuda",
    "cpu|cuda",
    "cpu\t",
)
NUMBERS = ("", ":", ":0", ":12", ":007", ":-1", ":+1", ":1a", ":a", ":1:", "::1", ": 1", ":1.0", "1", ":" + "9" * 40)
NAMES = [*(d + n for d in DEVICES for n in NUMBERS), *OTHERS]


def test_a_device_is_read_as_by_the_expression(tmp_path):
    """For each name the header finds what torch's own expression finds: a match or none, the device and its number."""
    assert _device_names.is_known(), "torch's headers use regular expressions in a new way: compare them with ours"
    expression = re.compile(re.search('re\\("(.*)"\\)', _device_names.KNOWN[1])[1])
    (tmp_path / "reader.cpp").write_text(READER)
    command = [get_cpp_compiler(), "-std=c++20", f"-I{_device_names.HEADERS}", "reader.cpp", "-o", "reader"]
    subprocess.run(command, cwd=tmp_path, check=True)
    read = subprocess.run(
        [tmp_path / "reader"], input="\n".join(NAMES) + "\n", text=True, capture_output=True, check=True
    )
    for name, line in zip(NAMES, read.stdout.splitlines(), strict=True):
        found, number, *parts = line.split(" ")
        want = expression.fullmatch(name)
        assert found == ("yes" if want else "no"), name
        if want:
            assert parts == [want[1], want[3] or ""] and number == str(int(want[3] is not None)), name
