"""interop converts values to those of TorchRec and back. Values without a counterpart raise."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.refused import assert_refused

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

pytest.importorskip("torchrec")
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse import jagged_tensor as tr
from torchrec.types import DataType

from_torchrec, to_torchrec = fr.interop.from_torchrec, fr.interop.to_torchrec


@st.composite
def ids(draw):
    """Return random ids with one number of bags, or with one number for each key, with or without inverse indices."""
    x = draw(frs.keyed_jagged_tensors(same_bags=draw(st.booleans()), min_bags=1, weighted=draw(st.booleans())))
    if draw(st.booleans()):
        # a key may occur twice
        x = x.permute([*x.keys, x.keys[0]])
    if draw(st.booleans()):
        return x
    count = draw(st.integers(1, 5))
    rows = [draw(st.lists(st.integers(0, x.bags_of(k) - 1), min_size=count, max_size=count)) for k in x.keys]
    strides = None if len(set(x.strides or ())) <= 1 else x.strides  # equal strides say no more than none
    return replace(x, inverse=torch.tensor(rows), strides=strides)


@given(ids())
def test_ids_come_back(x):
    """from_torchrec(to_torchrec(x)) is x without its padding, in the memory of x."""
    theirs = to_torchrec(x)
    back = from_torchrec(theirs)
    assert_trees_close(back, x.unpad())
    assert theirs.values().data_ptr() == back.values.data_ptr() == x.unpad().values.data_ptr()
    assert theirs.offsets() is back.offsets is x.offsets
    assert theirs.keys() == list(x.keys)
    if len(set(x.keys)) == len(x.keys):
        got = {k: [bag.tolist() for bag in bags.to_dense()] for k, bags in theirs.to_dict().items()}
        assert got == x.to_lists()


@given(frs.keyed_jagged_tensors(keys=("a", "b"), min_bags=1, weighted=True))
def test_keys_without_weights_have_ones_there(x):
    """In TorchRec either all keys have weights or no key has weights. A key without weights here gets weights of 1
    there."""
    theirs = to_torchrec(replace(x, unweighted=("b",)))
    assert theirs["b"].weights().tolist() == [1.0] * theirs["b"].values().numel()
    assert_trees_close(theirs["a"].weights(), x["a"].unpad().weights)


@given(ids(), st.booleans())
def test_their_ids_come_back(x, by_lengths):
    """to_torchrec(from_torchrec(y)) equals y by TorchRec's own comparison, whether y has lengths or offsets."""
    x = x.unpad()
    form = {"lengths": x.lengths} if by_lengths else {"offsets": x.offsets}
    if x.strides is not None or x.inverse is not None:
        form["stride_per_key_per_rank"] = [[x.bags_of(k)] for k in x.keys]
    if x.inverse is not None:
        form["inverse_indices"] = (list(x.keys), x.inverse)
    y = tr.KeyedJaggedTensor(list(x.keys), x.values, x.weights, **form)
    back = to_torchrec(from_torchrec(y))
    # the conversion did not write to y
    assert (y.lengths_or_none() is None) == ("lengths" not in form)
    assert tr.kjt_is_equal(back, y)
    assert back.stride_per_key() == y.stride_per_key() and back.stride() == y.stride()
    assert (back.inverse_indices_or_none() is None) == (x.inverse is None)
    if x.inverse is not None:
        assert_trees_close(back.inverse_indices()[1], x.inverse)


@given(ids())
def test_inverse_indices_of_another_order_are_put_in_the_keys(x):
    """TorchRec names the rows of its inverse indices. Our inverse indices are reordered to the order of the keys."""
    if x.inverse is None or len(set(x.keys)) < len(x.keys):
        return
    names = list(reversed(x.keys))
    y = to_torchrec(x)
    y._inverse_indices = (names, x.inverse.flip(0))
    assert_trees_close(from_torchrec(y), x.unpad())


@given(frs.jagged_tensors(min_bags=1, row_shape=()), frs.jagged_tensors(row_shape=(2,), dtypes=(torch.float32,)))
def test_bags_come_back(x, rows):
    """A JaggedTensor of numbers or of vectors, and a dict of these, convert to TorchRec's values and back. The values
    of TorchRec hold the same bags."""
    for own in (x, rows):
        assert_trees_close(from_torchrec(to_torchrec(own)), own.unpad())
    assert_trees_close(from_torchrec(to_torchrec({"x": x, "rows": rows})), {"x": x.unpad(), "rows": rows.unpad()})
    theirs = tr.JaggedTensor(x.unpad().values, x.unpad().weights, lengths=x.lengths)
    assert_trees_close(from_torchrec(theirs).to_lists(), [bag.tolist() for bag in theirs.to_dense()])
    assert tr.jt_is_equal(to_torchrec(from_torchrec(theirs)), theirs)


@given(frs.keyed_tensors())
def test_pooled_features_come_back(x):
    """A KeyedTensor converts to a KeyedTensor of TorchRec and back in the same memory. The KeyedTensor of TorchRec has
    the same columns."""
    theirs = to_torchrec(x)
    assert_trees_close(from_torchrec(theirs), x)
    assert theirs.values() is x.values is from_torchrec(theirs).values
    assert_trees_close(theirs.to_dict(), x.to_dict())


@given(frs.keyed_tensors(dtypes=(torch.float32,), num_rows=3))
def test_derivatives_pass(x):
    """Gradients of a tensor inside a value pass through both conversions."""
    f = lambda v: from_torchrec(to_torchrec(replace(x, values=v))).values.square().sum()
    assert_trees_close(torch.func.grad(f)(x.values), 2 * x.values)


# -- configs -------------------------------------------------------------------------------------------------------

INITIALIZERS = (fr.uniform(), fr.uniform(0.25), fr.normal(0.5), fr.xavier_normal(), fr.constant(2.0))


@st.composite
def collections(draw):
    """Return random (tables, features, weighted) of one collection. The features are named and ordered as in the
    collection's output."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    tables = [replace(t, initializer=draw(st.sampled_from(INITIALIZERS))) for t in
              draw(frs.table_configs(dtypes=dtypes))]  # fmt: skip
    weighted, sequences = draw(st.booleans()), draw(st.booleans())
    columns = [draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)) for _ in tables]
    every = [c for own in columns for c in own]
    features = []
    for t, own in zip(tables, columns):
        pooling = "none" if sequences else draw(st.sampled_from(["sum", "mean"]))
        for c in own:
            named = (f"{c}@{t.name}", c) if every.count(c) > 1 else (c, None)
            features.append(fr.FeatureConfig(named[0], t.name, pooling, weighted=weighted, column=named[1]))
    return tuple(tables), tuple(features), weighted


def comparable(config):
    """Return a config in which `init_fn` is replaced by the distribution that it draws from."""
    fn = config.init_fn
    drawn = (fn.func, fn.args, tuple(sorted(fn.keywords.items()))) if isinstance(fn, partial) else fn
    return type(config), {**vars(config), "init_fn": drawn}


@given(collections())
def test_configs_come_back(collection):
    """Tables and features, converted to configs and back, are the same. So are configs made from these tables and
    features. A collection made from the configs has the features' names as the keys of its output."""
    tables, features, weighted = collection
    configs = to_torchrec((tables, features), weighted=weighted)
    assert from_torchrec(configs, weighted=weighted) == (tables, features)
    again = to_torchrec(from_torchrec(configs), weighted=False) if not weighted else configs
    assert [comparable(c) for c in again] == [comparable(c) for c in configs]
    pooled = features[0].pooling != "none"
    if pooled:
        module = EmbeddingBagCollection(configs, is_weighted=weighted)
        assert module._embedding_names == [f.name for f in features]
        assert from_torchrec(module) == (tables, features)
    elif len({t.embedding_dim for t in tables}) == 1:
        module = EmbeddingCollection(configs)
        assert [n for own in module.embedding_names_by_table() for n in own] == [f.name for f in features]
        assert from_torchrec(module) == (tables, tuple(replace(f, weighted=False) for f in features))


@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda i: f"{i.kind}-{i.scale}")
def test_first_rows_are_of_one_distribution(initializer):
    """The initial rows of a collection have the mean and the spread of the rows of `init` for the same config."""
    table = fr.TableConfig("t", 900, 32, initializer=initializer)
    (config,) = to_torchrec(((table,), (fr.FeatureConfig("x", table="t"),)))
    torch.manual_seed(0)
    theirs = EmbeddingBagCollection([config]).embedding_bags["t"].weight.detach()
    ours = fr.init(fr.key(0), [table])["t"]
    for moment in (torch.mean, torch.std, torch.amax):
        assert abs(moment(theirs) - moment(ours)) <= 0.15 * ours.abs().amax()


# -- what has no counterpart -----------------------------------------------------------------------------------------

LENGTHS, VALUES = torch.tensor([2, 0, 1, 1]), torch.arange(4)
bag_config = partial(EmbeddingBagConfig, num_embeddings=10, embedding_dim=4, name="t", feature_names=["x"])
T, F = fr.TableConfig("t", 10, 4), fr.FeatureConfig("x", table="t")
U = fr.TableConfig("u", 10, 4)
Q = fr.quantize({"t": torch.ones(10, 4)})
pair = lambda *features, tables=(T,): to_torchrec((tables, features))

WRONG = {  # call: (kind, a part of the message)
    "a list": (lambda: from_torchrec([1, 2]), TypeError, "`x` is not one of TorchRec's values"),
    "ours": (lambda: from_torchrec(T), TypeError, "`x` is not one of TorchRec's values"),
    "no flag": (lambda: from_torchrec(bag_config(), weighted="no"), TypeError, "`weighted` is not a truth value"),
    "two ranks": (lambda: from_torchrec(tr.KeyedJaggedTensor(["a", "b"], VALUES, lengths=LENGTHS,
        stride_per_key_per_rank=[[1, 1], [1, 1]])), ValueError, "batches of several ranks"),
    "other inverse": (lambda: from_torchrec(tr.KeyedJaggedTensor(["a", "b"], VALUES, lengths=LENGTHS,
        stride_per_key_per_rank=[[2], [2]], inverse_indices=(["a", "z"], torch.zeros(2, 3, dtype=torch.int64)))),
        ValueError, "inverse indices of other keys"),
    "gaps": (lambda: from_torchrec(tr.JaggedTensor(VALUES, lengths=LENGTHS - 1, offsets=torch.tensor([0, 2, 2, 3, 4]))),
        ValueError, "lengths that differ from its offsets"),
    "offsets of another buffer": (lambda: from_torchrec(tr.JaggedTensor(VALUES, offsets=torch.tensor([1, 2]))),
        ValueError, "`offsets` does not begin at 0"),
    "keys in rows": (lambda: from_torchrec(tr.KeyedTensor(["a"], [2], torch.ones(2, 3), key_dim=0)), ValueError,
        "keys elsewhere than in columns"),
    "int8": (lambda: from_torchrec(bag_config(data_type=DataType.INT8)), TypeError, "rows that are not trained"),
    "virtual": (lambda: from_torchrec(bag_config(use_virtual_table=True)), ValueError, "`use_virtual_table`"),
    "pruned": (lambda: from_torchrec(bag_config(num_embeddings_post_pruning=3)), ValueError,
        "`num_embeddings_post_pruning`"),
    "bags that pool nothing": (lambda: from_torchrec(bag_config(pooling=PoolingType.NONE)), ValueError,
        "is NONE"),
    "one-sided": (lambda: from_torchrec(bag_config(weight_init_min=0.0, weight_init_max=1.0)), ValueError,
        "`init_fn` of table 't' has no counterpart"),
    "own init_fn": (lambda: from_torchrec(bag_config(init_fn=lambda w: w.fill_(3))), ValueError, "`init_fn` of table"),
    "off the middle": (lambda: from_torchrec(bag_config(init_fn=partial(torch.nn.init.normal_, mean=1.0))), ValueError,
        "`init_fn` of table"),
    "two kinds": (lambda: from_torchrec([bag_config(), EmbeddingConfig(10, 4, "u", feature_names=["y"])]), TypeError,
        "configs of two collections"),
    "a name twice": (lambda: from_torchrec([bag_config(), bag_config()]), ValueError, "twice"),
    "a tensor": (lambda: to_torchrec(VALUES), TypeError, "`x` has no counterpart"),
    "quantised tables": (lambda: to_torchrec((Q, (F,))), TypeError,
        "module.load_state_dict(fr.interop.to_torchrec_state_dict("),
    "params": (lambda: to_torchrec(fr.Params({"t": torch.ones(10, 4)}, {})), TypeError, "numbers of Params"),
    "tables alone": (lambda: to_torchrec((T,)), TypeError, "`x` has no counterpart"),
    "hash": (lambda: pair(replace(F, hash=fr.modulo())), ValueError, "`hash` of feature 'x'"),
    "max_length": (lambda: pair(replace(F, max_length=3)), ValueError, "`max_length` of feature 'x'"),
    "weighted": (lambda: pair(replace(F, weighted=True)), ValueError, "feature 'x' is weighted"),
    "another name": (lambda: pair(replace(F, name="z", column="x")), ValueError, "would have another name"),
    "f64": (lambda: pair(F, tables=(replace(T, dtype=torch.float64),)), TypeError, "dtype that TorchRec lacks"),
    "own initializer": (lambda: pair(F, tables=(replace(T, initializer=lambda *a: 0),)), TypeError,
        "`initializer` of table 't'"),
    "two poolings": (lambda: pair(F, fr.FeatureConfig("y", "t", "mean")), ValueError, "pooled in two ways"),
    "a column twice": (lambda: pair(replace(F, name="x@t", column="x"), replace(F, name="y", column="x")), ValueError,
        "reads a column twice"),
    "pooled and not": (lambda: pair(F, fr.FeatureConfig("y", "u", "none"), tables=(T, U)), ValueError,
        "some of the features are sequences"),
    "another order": (lambda: pair(fr.FeatureConfig("y", "u"), F, tables=(T, U)), ValueError, "in another order"),
    "no feature": (lambda: pair(F, tables=(T, U)), ValueError, "tables have no feature"),
    "no table": (lambda: pair(fr.FeatureConfig("x", "z")), KeyError, "name tables that `tables` lacks"),
}  # fmt: skip
# the constructors of funcrec's values raise these errors
BY_CONSTRUCTORS = {"offsets of another buffer", "a name twice"}


@pytest.mark.parametrize("name", WRONG)
def test_what_has_no_counterpart_is_named(name):
    """A value raises before any work, in four parts, if the other library cannot express it or if it does not belong to
    that library."""
    assert_refused(*WRONG[name], parts=("got", "need", *(() if name in BY_CONSTRUCTORS else ("try",))))


def test_without_torchrec_the_errors_say_so(monkeypatch):
    """If TorchRec is not installed, the error of to_torchrec says what to install."""
    import sys

    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(ModuleNotFoundError, match="TorchRec is not installed") as error:
        to_torchrec(fr.KeyedJaggedTensor.from_lists({"x": [[1]]}))
    assert "\n  try   pip install" in str(error.value)
    with pytest.raises(TypeError, match="not one of TorchRec's values"):
        from_torchrec(3)
