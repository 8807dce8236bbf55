"""Trees: any dict, list, tuple or value of funcrec, whose leaves are tensors and anything else.

    map(f, tree) = unflatten(structure(tree), [f(x) for x in leaves(tree)])

`fr.jit` and torch.func see the same leaves. Their order is the order in which Python shows them. None is not a leaf: it
belongs to the structure, and so do the static fields of a value, such as keys and dims.

>>> import torch, funcrec as fr
>>> params = fr.Params(tables={"item": torch.zeros(10, 4)}, dense={"w": torch.ones(4), "b": torch.ones(())})
>>> [path for path, _ in fr.tree.paths(params)]
["tables['item']", "dense['w']", "dense['b']"]
>>> mean = fr.tree.map(lambda m, x: 0.9 * m + 0.1 * x, fr.tree.map(torch.zeros_like, params), params)
>>> mean.dense["w"]
tensor([0.1000, 0.1000, 0.1000, 0.1000])
>>> fr.tree.num_parameters(params), fr.tree.nbytes(params)
(45, 180)
"""

import funcrec.core as _core
from funcrec.tree._tree import allclose as allclose
from funcrec.tree._tree import copy as copy
from funcrec.tree._tree import equal as equal
from funcrec.tree._tree import flatten as flatten
from funcrec.tree._tree import leaves as leaves
from funcrec.tree._tree import map as map
from funcrec.tree._tree import map_with_path as map_with_path
from funcrec.tree._tree import nbytes as nbytes
from funcrec.tree._tree import num_parameters as num_parameters
from funcrec.tree._tree import paths as paths
from funcrec.tree._tree import reduce as reduce
from funcrec.tree._tree import structure as structure
from funcrec.tree._tree import to as to
from funcrec.tree._tree import unflatten as unflatten

_core.publish(globals())
