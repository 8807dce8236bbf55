"""The most memory that lives at one time between the operations of a staged program.

    most_live_bytes = max over operations Σ bytes of the values that exist then, without the program's arguments

Views share the memory of the tensor that they show, which exists until the last of them is read.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph


def most_live_bytes(graph: Graph) -> int:
    """Return the most bytes that the values of a graph take at one time, if its operations run one after the other."""
    nodes = list(graph.nodes)
    number = {node: i for i, node in enumerate(nodes)}
    given, first, last, sizes = set(), {}, {}, {}
    for i, node in enumerate(nodes):
        for x in tensors_of(node.meta.get("val")):
            memory = x.untyped_storage()
            key = memory._cdata
            if node.op == "placeholder":
                given.add(key)
            sizes[key] = memory.nbytes()
            first.setdefault(key, i)
            last[key] = max([last.get(key, i), *(number[user] for user in node.users)])
    begins, ends = [0] * len(nodes), [0] * (len(nodes) + 1)
    for key in sizes.keys() - given:
        begins[first[key]] += sizes[key]
        ends[last[key] + 1] += sizes[key]
    live = most = 0
    for begun, ended in zip(begins, ends, strict=False):
        live += begun - ended
        most = max(most, live)
    return most


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors among the results of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    for x in value if isinstance(value, list | tuple) else ():
        yield from tensors_of(x)
