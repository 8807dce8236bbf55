"""of_rows, and products with second derivatives, for tables that are not a plain dict of tensors."""

import pickle
from dataclasses import replace

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

ITEM, READ = fr.TableConfig("item", 128, 3), fr.FeatureConfig("a", table="item")
IDS = fr.KeyedJaggedTensor.from_lists({"a": [[10**12, 2], [2, -7], []]})


def dense_of(tree):
    """Return a gradient with dense tables."""
    return {n: g.to_dense() for n, g in tree.tables.items()}, tree.dense


def square(params, ids):
    return (fr.lookup(params.tables, ids, [READ]).values * params.dense["w"]).square().sum()


def dynamic_params():
    """Return parameters after a step that admitted the ids of IDS but -7, and the plain table beside them."""
    vocabulary = fr.VocabularyConfig(fr.vocabulary(128), [ITEM], [READ])
    tables = fr.dynamic_tables(fr.init(fr.key(0), [ITEM]), {"items": vocabulary}, key=fr.key(0))
    step = fr.train_step(square, sparse=fr.optim.sgd(0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))
    known = fr.KeyedJaggedTensor.from_lists({"a": [[10**12, 2]]})
    return step(step.init(fr.Params(tables, {"w": torch.ones(3)})), known)[0].params


def test_dynamic_tables():
    """Vocabularies find the rows of ids, also after a pickle: gradients and products are those of the plain table."""
    params = dynamic_params()
    at = fr.find(params.tables.vocabularies["items"], IDS.values)
    rows = replace(IDS, values=at)
    plain = fr.Params({"item": params.tables["item"]}, params.dense)
    of = pickle.loads(pickle.dumps(fr.of_rows(square, params, IDS)))
    assert of.rows["item"].tolist() == sorted({x for x in at.tolist() if x >= 0})
    assert torch.equal(of.fn(of.params), square(params, IDS))
    got = dense_of(of.put(torch.func.grad(of.fn)(of.params)))
    assert_trees_close(got, dense_of(fr.value_and_grad(square)(plain, rows)[1]), rtol=1e-6, atol=1e-7)
    ones = fr.tree.map(torch.ones_like, plain)
    assert_trees_close(
        dense_of(fr.hvp(square)(params, ones, IDS)), dense_of(fr.hvp(square)(plain, ones, rows)), atol=1e-6
    )


def cached_params():
    store = fr.table_store([ITEM], fr.optim.sgd(0.1), key=fr.key(0))
    return fr.cached_tables({}, {"items": fr.CacheConfig(store, capacity=16, features=[READ])})


MESH = fr.Mesh.emulated(x=2)
OTHER_KINDS = {
    "sharded": (lambda t: fr.shard_tables(t, fr.Plan({"item": fr.row_wise("x")}), MESH), r"fr.gather_tables\(tables"),
    "quantised": (fr.quantize, "are read, and not trained"),
    "fake-quantised": (fr.fake_quantize, "not plain tables"),
    "cached": (lambda t: cached_params(), r"gather\(params\) of the fr.cached_step"),
    "stacked": (lambda t: {"item": t["item"].expand(2, -1, -1)}, "is not a table"),
}


@pytest.mark.parametrize(("kind", "said"), OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_other_kinds_of_tables_are_refused(kind, said):
    """Tables whose rows are elsewhere, or are not floats, are refused with what to try. A vmap takes stacked ones."""
    params = fr.Params(kind(fr.init(fr.key(0), [ITEM])), {"w": torch.ones(3)})
    with pytest.raises(TypeError, match=said):
        fr.of_rows(square, params, IDS)


def test_stacked_tables_under_vmap():
    """A function of the rows of each member's tables has each member's gradient."""
    stacked = torch.stack([fr.init(fr.key(k), [ITEM])["item"] for k in range(2)])
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[5, 2], [2]]})

    def gradient(table):
        of = fr.of_rows(square, fr.Params({"item": table}, {"w": torch.ones(3)}), ids)
        return of.put(torch.func.grad(of.fn)(of.params)).tables["item"].to_dense()

    assert_trees_close(torch.func.vmap(gradient)(stacked), torch.stack([*map(gradient, stacked)]), atol=1e-6)
