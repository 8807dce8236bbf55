"""Bad inputs of values and lookups. Each row is a call, the call's exception, and a part of the message."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import funcrec as fr
from funcrec.testing import assert_trees_close, check_adjoint, check_grads, check_invariant, check_invariant_step

META = torch.device("meta")
i64 = lambda *numbers: torch.tensor(numbers, dtype=torch.int64)
f32 = lambda *shape: torch.zeros(shape)
JT, KJT, KT, RG = fr.JaggedTensor, fr.KeyedJaggedTensor, fr.KeyedTensor, fr.RowGrads
FC, TC = fr.FeatureConfig, fr.TableConfig
IDS = KJT.from_lists({"a": [[0, 1], []], "b": [[2], [0]]})
WEIGHTED = KJT.from_lists({"a": [[0, 1]]}, weights={"a": [[1.0, 2.0]]})
UNEVEN = KJT.from_lists({"a": [[0, 1], []], "b": [[2]]})
TABLES = {"t": f32(3, 2)}
A = FC("a", table="t")
ACTS = fr.lookup(TABLES, IDS, [A])


def e(call, kind, *fragments):
    return call, kind, fragments


ROWS = {
    # JaggedTensor
    "JaggedTensor.from_lengths: sum": e(lambda: JT.from_lengths(i64(1, 2, 3), i64(1, 1)), ValueError,
        "`lengths` does not sum", "sum 2", "from_offsets"),
    "JaggedTensor.from_lengths: negative": e(lambda: JT.from_lengths(i64(1), i64(2, -1)), ValueError, "negative length",
        "-1"),
    "JaggedTensor.from_lengths: float lengths": e(lambda: JT.from_lengths(i64(1), f32(1)), TypeError,
        "`lengths` is not a tensor of this dtype", "f32[1]", "i[B]", "lengths.long()"),
    "JaggedTensor.from_lengths: i16 lengths": e(lambda: JT.from_lengths(i64(1), i64(1).to(torch.int16)), TypeError,
        "i16[1]"),
    "JaggedTensor.from_lengths: matrix": e(lambda: JT.from_lengths(i64(1), i64(1)[None]), ValueError,
        "these dimensions"),
    "JaggedTensor.from_lengths: lengths a list": e(lambda: JT.from_lengths(i64(1), [1]), TypeError,
        "`lengths` is not a tensor", "list", "torch.tensor(lengths)"),
    "JaggedTensor.from_lengths: scalar values": e(lambda: JT.from_lengths(torch.tensor(1), i64(1)), ValueError,
        "`values`", "[N, ...]"),
    "JaggedTensor.from_lengths: device": e(lambda: JT.from_lengths(i64(1), i64(1).to(META)), ValueError,
        "another device", "meta"),
    "JaggedTensor.from_lengths: weights' shape": e(lambda: JT.from_lengths(i64(1, 2), i64(2), weights=f32(3)),
        ValueError, "`weights` does not match `values`", "f32[3]", "f[2], as `values`, which is i64[2]", "=None"),
    "JaggedTensor.from_lengths: weights' dtype": e(lambda: JT.from_lengths(i64(1), i64(1), weights=i64(1)), TypeError,
        "`weights` is not a tensor of this dtype", "weights.float()"),
    "JaggedTensor.from_lengths: weights' device": e(lambda: JT.from_lengths(i64(1), i64(1), weights=f32(1).to(META)),
        ValueError, "`weights` is on another device"),
    "JaggedTensor.from_offsets: descends": e(lambda: JT.from_offsets(i64(1, 2, 3), i64(0, 2, 1)), ValueError,
        "`offsets` descends", "offsets[1] = 2, offsets[2] = 1", "from_lengths"),
    "JaggedTensor.from_offsets: begins": e(lambda: JT.from_offsets(i64(1, 2, 3), i64(1, 2)), ValueError,
        "does not begin at 0", "offsets[0] = 1"),
    "JaggedTensor.from_offsets: ends": e(lambda: JT.from_offsets(i64(1), i64(0, 2)), ValueError,
        "ends beyond the values", "offsets[-1] = 2; 1 values"),
    "JaggedTensor.from_offsets: empty": e(lambda: JT.from_offsets(i64(1), i64()), ValueError, "`offsets` is empty"),
    "JaggedTensor.from_lists: weights of other bags": e(lambda: JT.from_lists([[1, 2], []], weights=[[1.0], [2.0]]),
        ValueError, "`weights`", "[2, 0]"),
    "JaggedTensor.from_lists: too few weights": e(lambda: JT.from_lists([[1, 2]], weights=[[1.0]]), ValueError,
        "`weights`"),
    "JaggedTensor.from_lists: no bags": e(lambda: JT.from_lists([[1], 2]), TypeError, "`lists[1]` is not a bag",
        "int 2", "a bag [id]"),
    "JaggedTensor.from_lists: a number": e(lambda: JT.from_lists(3), TypeError, "`lists` is not a list of bags",
        "int 3"),
    "JaggedTensor.from_lists: weights no bags": e(lambda: JT.from_lists([[1]], weights=[0.5]), TypeError,
        "`weights[0]` is not a bag", "float 0.5"),
    "JaggedTensor.from_lists: a scalar tensor": e(lambda: JT.from_lists([torch.tensor(1)]), TypeError,
        "`lists[0]` is not a bag", "i64[]"),
    "JaggedTensor.from_padded: vector": e(lambda: JT.from_padded(i64(1), i64(1)), ValueError, "`padded`",
        "[B, L, ...]"),
    "JaggedTensor.from_padded: lengths' shape": e(lambda: JT.from_padded(f32(2, 3), i64(1)), ValueError,
        "`lengths` does not match `padded`"),
    "JaggedTensor.from_padded: too long": e(lambda: JT.from_padded(f32(2, 3), i64(4, 0)), ValueError, "from 0 to 4",
        "0 to 3"),
    "JaggedTensor.from_padded: negative": e(lambda: JT.from_padded(f32(1, 3), i64(-1)), ValueError,
        "leave the padded dimension"),
    "JaggedTensor.from_padded: weights": e(lambda: JT.from_padded(f32(1, 3), i64(1), weights=f32(3)), ValueError,
        "`weights` is not a tensor of these dimensions", "f[B, L]"),
    "JaggedTensor[...]: beyond": e(lambda: JT.from_lists([[1]])[1], IndexError, "not positions of bags", "[-1, 1)",
        "select"),
    "JaggedTensor[...]: float": e(lambda: JT.from_lists([[1]])[[0.5]], IndexError, "[0.5]"),
    "JaggedTensor.pad_to: smaller": e(lambda: JT.from_lists([[1, 2]]).pad_to(1), ValueError, "`capacity` is smaller",
        "capacity >= 2", "unpad"),
    "JaggedTensor.pad_to: negative": e(lambda: JT.from_lists([]).pad_to(-1), ValueError,
        "`capacity` is out of range", "an int >= 0"),
    "JaggedTensor.to_padded: negative": e(lambda: JT.from_lists([[1, 2]]).to_padded(-1), ValueError,
        "`length` is out of range", "-1", "an int >= 0"),
    # Batch, features
    "Batch: labels in a list": e(lambda: fr.Batch(IDS, [0, 1]), TypeError, "`label` is not a tensor",
        "torch.tensor(label"),
    "Batch: ids in a dict": e(lambda: fr.Batch({"a": [[0]]}), TypeError, "`ids` are not ids", "from_lists"),
    "lookup: features by name": e(lambda: fr.lookup(TABLES, IDS, ["a"]), TypeError, "got   list with str 'a'",
        "[fr.FeatureConfig('a', table=\"item\")]"),
    "lookup: a feature alone": e(lambda: fr.lookup(TABLES, IDS, A), TypeError, "try   [feature]"),
    "jit(step).update": e(lambda: fr.jit(lambda x: x).update, AttributeError, "no such attribute", ".init of a step"),
    "validate: weights nobody reads": e(lambda: fr.validate(WEIGHTED, [A], TABLES), fr.CheckError,
        "weights of ids of 'a' are read by no feature: ['a']", "weight 2.0 of id 1, 1 in all", "weighted=True"),
    "validate: label -1": e(lambda: fr.validate(fr.Batch(IDS, f32(2).sub(1)), [A], TABLES), fr.CheckError,
        "got   batch.label[0] = -1.0", "(label > 0).float(): -1 is not a label"),
    "validate: ratings": e(lambda: fr.validate(fr.Batch(IDS, f32(2).add(3)), [A], TABLES), fr.CheckError,
        "labels in [0, 1]", "label >= 4, say", "labels=(1, 5)) for labels of another range"),
    "validate: no range": e(lambda: fr.validate(IDS, [A], TABLES, labels=(1, 0)), ValueError,
        "`labels` is not a range", "got   (1, 0)"),
    "sequence_ids: key": e(lambda: fr.sequence_ids(IDS, [FC("c", table="t", pooling="none")]), KeyError,
        "feature 'c' has no ids"),
    "RowGrads: a mask": e(lambda: RG.from_entries(f32(2).bool(), f32(2, 1), num_embeddings=3), TypeError,
        "got   bool[2]", "rows.nonzero()[:, 0]"),
    # KeyedJaggedTensor
    "KeyedJaggedTensor: TorchRec's order": e(lambda: KJT(["a"], i64(2), None, i64(2)), TypeError,
        "the fields are others", "got   values: list", "from_lengths(keys, values, lengths)"),
    "KeyedJaggedTensor: TorchRec's names": e(lambda: KJT(keys=["a"], values=i64(2), lengths=i64(2)), TypeError,
        "lengths: i64[1]", "fr.interop.from_torchrec"),
    "KeyedJaggedTensor: listed keys": e(lambda: KJT(i64(2), i64(2), keys=["a"]), TypeError, "a tuple of names"),
    "KeyedJaggedTensor: keys third": e(lambda: KJT(i64(2), i64(2), ["a"]), TypeError, "weights: list"),
    "KeyedJaggedTensor.from_lists: no bags": e(lambda: KJT.from_lists({"a": [[0]], "b": [1, 2]}), TypeError,
        "`lists['b'][0]` is not a bag", "int 1", "a bag [id]"),
    "KeyedJaggedTensor.from_lists: a number": e(lambda: KJT.from_lists({"a": 3}), TypeError,
        "`lists['a']` is not a list of bags", "int 3"),
    "KeyedJaggedTensor.from_lists: text": e(lambda: KJT.from_lists({"a": ["12"]}), TypeError,
        "`lists['a'][0]` is not a bag", "str '12'"),
    "KeyedJaggedTensor.from_lists: weights no bags": e(lambda: KJT.from_lists({"a": [[0]]}, weights={"a": [0.5]}),
        TypeError, "`weights['a'][0]` is not a bag"),
    "KeyedJaggedTensor.from_lists: weights' keys": e(lambda: KJT.from_lists({"a": [[1]]}, weights={"b": [[1.0]]}),
        ValueError, "keys of the two arguments differ"),
    "KeyedJaggedTensor.from_lists: weights' bags": e(lambda: KJT.from_lists({"a": [[1], []]},
            weights={"a": [[], [1.0]]}), ValueError, "`weights['a']` has bags of other lengths", "[0, 1]", "[1, 0]"),
    "KeyedJaggedTensor.from_lengths: duplicate keys": e(lambda: KJT.from_lengths(["a", "a"], i64(), i64(0, 0)),
        ValueError, "names a feature twice", "['a']"),
    "KeyedJaggedTensor.from_lengths: keys": e(lambda: KJT.from_lengths([1], i64(), i64(0)), TypeError,
        "`keys[0]` is not a string", "int 1"),
    "KeyedJaggedTensor.from_lengths: multiple": e(lambda: KJT.from_lengths(["a", "b"], i64(), i64(0, 0, 0)), ValueError,
        "not a multiple of the keys", "3 bags for 2 keys", "strides"),
    "KeyedJaggedTensor.from_lengths: no keys": e(lambda: KJT.from_lengths([], i64(), i64(0)), ValueError,
        "1 bags for 0 keys"),
    "KeyedJaggedTensor.from_lengths: strides": e(lambda: KJT.from_lengths(["a", "b"], i64(), i64(0, 0, 0),
            strides=(1, 1)), ValueError, "does not match `strides`"),
    "KeyedJaggedTensor.from_lengths: strides of keys": e(lambda: KJT.from_lengths(["a"], i64(), i64(0, 0),
            strides=(1, 1)), ValueError, "`strides` does not match the keys"),
    "KeyedJaggedTensor.from_lengths: sum": e(lambda: KJT.from_lengths(["a"], i64(1), i64(2)), ValueError,
        "does not sum"),
    "KeyedJaggedTensor.from_lengths: weights": e(lambda: KJT.from_lengths(["a"], i64(1), i64(1), weights=f32(2)),
        ValueError, "`weights` does not match"),
    "KeyedJaggedTensor.from_offsets: descends": e(lambda: KJT.from_offsets(["a"], i64(1, 2), i64(0, 2, 1)), ValueError,
        "`offsets` descends"),
    "KeyedJaggedTensor.from_offsets: empty": e(lambda: KJT.from_offsets(["a"], i64(1, 2), i64()), ValueError,
        "`offsets` is empty"),
    "KeyedJaggedTensor.from_jagged: type": e(lambda: KJT.from_jagged({"a": i64(1)}), TypeError,
        "`features['a']` is not a JaggedTensor", "i64[1]"),
    "KeyedJaggedTensor.from_lists: weights of no key": e(lambda: KJT.from_lists({"a": [[1]]}, weights={"b": [[1.0]]}),
        ValueError, "keys of the two arguments differ", "['b']", "some of ['a']"),
    "KeyedJaggedTensor.from_offsets: unweighted": e(lambda: KJT.from_offsets(["a"], i64(1), i64(0, 1), weights=f32(1),
                unweighted=["b"]), ValueError, "`unweighted` names other keys", "('b',)", "some of ['a']"),
    "KeyedJaggedTensor.from_lengths: unweighted, no weights": e(lambda: KJT.from_lengths(["a"], i64(1), i64(1),
                unweighted=["a"]), ValueError, "`unweighted` names keys, and none has weights"),
    "KeyedJaggedTensor.from_jagged: dtypes": e(lambda: KJT.from_jagged({"a": JT.from_lists([[1]]),
                "b": JT.from_lists([[1.0]])}), TypeError, "differ in dtype", "b: f32[1]"),
    "KeyedJaggedTensor.from_padded: keys": e(lambda: KJT.from_padded({"a": f32(1, 1)}, {"b": i64(1)}), ValueError,
        "keys of the two arguments differ"),
    "KeyedJaggedTensor[key]": e(lambda: IDS["c"], KeyError, "the key does not exist", "'c'", "['a', 'b']"),
    "KeyedJaggedTensor[bag]": e(lambda: IDS[2], IndexError, "[-2, 2)"),
    "KeyedJaggedTensor[bag] with strides": e(lambda: UNEVEN[0], ValueError, "different numbers of bags", "bags_of"),
    "KeyedJaggedTensor.permute: name": e(lambda: IDS.permute(["a", "c"]), KeyError, "'c'"),
    "KeyedJaggedTensor.permute: position": e(lambda: IDS.permute([2]), (IndexError, KeyError), "2"),
    "KeyedJaggedTensor.split": e(lambda: IDS.split([1]), ValueError, "do not add up to the number of keys", "sum to 2"),
    "KeyedJaggedTensor.concat: keys": e(lambda: KJT.concat([IDS, IDS]), ValueError, "names a feature twice"),
    "KeyedJaggedTensor.concat: bags": e(lambda: KJT.concat([IDS, KJT.from_lists({"c": [[1]]})]), ValueError,
        "different numbers of bags", "[2, 1]"),
    "KeyedJaggedTensor.concat: type": e(lambda: KJT.concat([IDS, 3]), TypeError,
        "`parts[1]` is not a KeyedJaggedTensor", "int 3"),
    "KeyedJaggedTensor.pad_to: smaller": e(lambda: IDS.pad_to(1), ValueError, "capacity >= 4"),
    # KeyedTensor
    "KeyedTensor.from_dict: empty": e(lambda: KT.from_dict({}), ValueError, "`features` are none"),
    "KeyedTensor.from_dict: vector": e(lambda: KT.from_dict({"a": f32(2)}), ValueError,
        "`features['a']` is not a tensor of these dimensions", "[B, D, ...]"),
    "KeyedTensor.from_dict: rows": e(lambda: KT.from_dict({"a": f32(2, 1), "b": f32(3, 1)}), ValueError,
        "different numbers of rows"),
    "KeyedTensor[key]": e(lambda: KT.from_dict({"a": f32(2, 1)})["b"], KeyError, "'b'", "['a']"),
    "KeyedTensor.stack": e(lambda: KT.from_dict({"a": f32(2, 1), "b": f32(2, 2)}).stack(), ValueError,
        "differ in width", "'b': 2"),
    "KeyedTensor.concat": e(lambda: KT.concat([KT.from_dict({"a": f32(2, 1)})] * 2), ValueError, "several parts",
        "['a']"),
    "regroup: unknown": e(lambda: fr.regroup([KT.from_dict({"a": f32(2, 1)})], [["c"]]), KeyError, "unknown keys",
        "['c']"),
    "regroup: twice": e(lambda: fr.regroup([KT.from_dict({"a": f32(2, 1)})] * 2, [["a"]]), ValueError, "several parts"),
    "regroup: empty group": e(lambda: fr.regroup([KT.from_dict({"a": f32(2, 1)})], [["a"], []]), ValueError,
        "`groups[1]` is empty", "one or more keys"),
    # states
    "value_and_grad: tables of a transform": e(lambda: fr.value_and_grad(lambda p: p.dense)(fr.Params(0, f32())),
        TypeError, "`params.tables` is not a dict of tables", "int 0", "{name: f[R, D]}"),
    "Params: tables": e(lambda: fr.Params([f32(1, 1)], {}), TypeError, "`tables` is not a dict of tables", "list",
        "{name: f[R, D]}"),
    # configs
    "TableConfig: name": e(lambda: TC("", 1, 1), ValueError, "`name` is empty"),
    "TableConfig: rows": e(lambda: TC("t", 0, 1), ValueError, "`num_embeddings` is out of range"),
    "TableConfig: dtype": e(lambda: TC("t", 1, 1, dtype=torch.int8), TypeError, "`dtype` cannot be trained",
        "quantize"),
    "FeatureConfig: pooling": e(lambda: FC("f", table="t", pooling="min"), ValueError, "`pooling` is unknown", "'min'",
        "'sum' or 'mean' or 'max' or 'none'"),
    "FeatureConfig: max_length": e(lambda: FC("f", table="t", max_length=0), ValueError,
        "`max_length` is out of range"),
    "FeatureConfig: hash": e(lambda: FC("f", table="t", hash="modulo"), TypeError, "`hash` is not a Hash",
        "fr.modulo()"),
    "init: twice": e(lambda: fr.init(fr.key(0), [TC("t", 1, 1)] * 2), ValueError, "`tables` has a name twice", "['t']"),
    "hash_rows: tall": e(lambda: fr.hash_rows(i64(1), fr.multiply_shift(), 2**31), ValueError, "cannot reach every row",
        "modulo()"),
    # lookups
    "lookup: float ids": e(lambda: fr.lookup(TABLES, KJT.from_lists({"a": [[0.5]]}), [A]), TypeError,
        "`ids.values` are not ids", "values.long()"),
    "lookup: key": e(lambda: fr.lookup(TABLES, IDS, [FC("c", table="t")]), KeyError, "feature 'c' has no ids",
        "['a', 'b']"),
    "lookup: column": e(lambda: fr.lookup(TABLES, IDS, [FC("a", table="t", column="c")]), KeyError,
        "feature 'a' has no ids", "'c'"),
    "lookup: table": e(lambda: fr.lookup(TABLES, IDS, [FC("a", table="u")]), KeyError,
        "`features['a'].table` is not a table", "'u'", "['t']"),
    "lookup: weights": e(lambda: fr.lookup(TABLES, IDS, [FC("a", table="t", weighted=True)]), ValueError,
        "feature 'a' is weighted", "weighted=False"),
    "lookup: features twice": e(lambda: fr.lookup(TABLES, IDS, [A, A]), ValueError, "`features` has a name twice",
        "another name with column=..."),
    "lookup: one feature": e(lambda: fr.lookup(TABLES, IDS, A), TypeError, "`features` are not feature configs"),
    "lookup: table's shape": e(lambda: fr.lookup({"t": f32(3)}, IDS, [A]), TypeError, "`tables['t']` is not a table",
        "f32[3]"),
    "lookup: table's dtype": e(lambda: fr.lookup({"t": torch.zeros(3, 2, dtype=torch.int8)}, IDS, [A]), TypeError,
        "`tables['t']` is not a table"),
    "lookup: device": e(lambda: fr.lookup({"t": f32(3, 2).to(META)}, IDS, [A]), ValueError, "different devices",
        "['cpu', 'meta']"),
    "lookup: bags": e(lambda: fr.lookup(TABLES, UNEVEN, [A, FC("b", table="t")]), ValueError,
        "different numbers of bags", "'b': 1"),
    "lookup: only sequences": e(lambda: fr.lookup(TABLES, IDS, [FC("a", table="t", pooling="none")]), ValueError,
        "no feature is for this lookup", "lookup_sequence"),
    "lookup: tall table of i32 ids": e(lambda: fr.lookup({"t": torch.empty(2**31, 1, device=META)},
            KJT(i64(0).int().to(META), i64(0, 1).to(META), keys=("a",)), [A]), ValueError, "hold every row", "i32[1]"),
    "lookup_sequence: only pooled": e(lambda: fr.lookup_sequence(TABLES, IDS, [A]), ValueError,
        "no feature is for this lookup", "funcrec.lookup"),
    "lookup_sequence: key": e(lambda: fr.lookup_sequence(TABLES, IDS, [FC("c", table="t", pooling="none")]), KeyError,
        "feature 'c' has no ids"),
    "lookup_transpose: tables by name": e(lambda: fr.lookup_transpose(ACTS, IDS, [A], ["t"]), TypeError,
        "`tables` are not table configs", "a sequence of TableConfig"),
    "lookup_transpose: features": e(lambda: fr.lookup_transpose(ACTS, IDS, [FC("b", table="t")], TABLES), ValueError,
        "`d_acts` has other features"),
    "lookup_transpose: dims": e(lambda: fr.lookup_transpose(ACTS, IDS, [A], [TC("t", 3, 5)]), ValueError,
        "`d_acts` has other features", "'a': 5"),
    "lookup_transpose: width": e(lambda: fr.lookup_transpose(KT(f32(2, 3), ("a",), (2,)), IDS, [A], TABLES), ValueError,
        "does not match its dims"),
    "lookup_transpose: bags": e(lambda: fr.lookup_transpose(KT(f32(1, 2), ("a",), (2,)), IDS, [A], TABLES), ValueError,
        "`d_acts`", "f32[1, 2]", "2"),
    "lookup_sequence_transpose: shape": e(lambda: fr.lookup_sequence_transpose({"a": JT(f32(1, 2), i64(0, 1))}, IDS,
            [FC("a", table="t", pooling="none")], TABLES), ValueError, "`d_sequences['a']` does not match", "f32[1, 2]",
        "f[4, 2]"),
    "lookup_sequence_transpose: missing": e(lambda: fr.lookup_sequence_transpose({}, IDS,
            [FC("a", table="t", pooling="none")], TABLES), KeyError, "d_sequences", "'a'"),
    # RowGrads
    "RowGrads.from_entries: grads": e(lambda: RG.from_entries(i64(1), f32(2, 1), num_embeddings=1), ValueError,
        "`grads` does not match `rows`", "f32[2, 1]", "as `rows`, which is i64[1]"),
    "RowGrads + RowGrads": e(lambda: RG.zeros((2, 3)) + RG.zeros((2, 4)), ValueError, "belong to different tables",
        "[2, 3] and [2, 4]"),
    # remat
    "remat: not a function": e(lambda: fr.remat(f32(2)), TypeError, "`fn`", "f32[2]"),
    "remat: a draw": e(lambda: fr.remat(lambda x: torch.rand(2) * x)(f32(2)), TypeError,
        "draws from torch's generator"),
    "remat: a write": e(lambda: fr.remat(lambda x: x.add_(1))(f32(2)), ValueError, "writes to its argument", "args[0]"),
    # invariant
    "invariant: not a function": e(lambda: fr.invariant(f32(2)), TypeError, "`fn`", "f32[2]"),
    "invariant: another operator": e(lambda: fr.invariant(torch.lgamma)(f32(2)), TypeError, "no fixed order", "lgamma"),
    "invariant: a derivative outside": e(lambda: torch.func.grad(fr.invariant(torch.sum))(f32(2)), TypeError,
        "differentiated from outside", "around the derivative"),
    "invariant: in place": e(lambda: fr.invariant(lambda x: x.add_(1.5))(i64(2)), TypeError, "does not fit", "float32"),
    # value_and_grad
    "accumulate_grads: not a number": e(lambda: fr.accumulate_grads(lambda p, b: f32(), 0), ValueError,
        "`num_micro_batches`"),
    "accumulate_grads: uneven": e(lambda: fr.accumulate_grads(lambda p, b: f32(), 2)(fr.Params({}, f32()), f32(3)),
        ValueError, "`batch` is not cut evenly"),
    "accumulate_grads: sizes": e(
        lambda: fr.accumulate_grads(lambda p, b: f32(), 2)(fr.Params({}, f32()), [f32(2), f32(4)]), ValueError,
        "other numbers of examples"),
    "accumulate_grads: a scalar": e(lambda: fr.accumulate_grads(lambda p, b: f32(), 2)(fr.Params({}, f32()), f32()),
        ValueError, "cannot be cut by its examples"),
    "accumulate_grads: nothing": e(lambda: fr.accumulate_grads(lambda p, b: f32(), 2)(fr.Params({}, f32()), None),
        TypeError, "`batch` has no examples"),
    "accumulate_grads: aux": e(
        lambda: fr.accumulate_grads(lambda p, b: (p.dense * 1, b.long()), 2, True)(fr.Params({}, f32()), f32(2)),
        TypeError, "`aux` has no mean"),
    "accumulate_grads: weights": e(
        lambda: fr.accumulate_grads(lambda p, b: fr.losses.weighted_mean(b, p.dense.exp() * b), 2)(
            fr.Params({}, f32()), f32(2)), TypeError, "weights of examples are not the batch's own"),
    "accumulate_grads: candidates": e(
        lambda: fr.accumulate_grads(lambda p, b: fr.losses.in_batch_softmax(b, b, log_q=None), 2)(
            fr.Params({}, f32()), f32(2, 3)), ValueError, "the candidates of a micro-batch"),
    "value_and_grad: params": e(lambda: fr.value_and_grad(lambda p: p)({"t": 1}), TypeError,
        "`args[0]['t']` cannot be differentiated"),
    "value_and_grad: dense int": e(lambda: fr.value_and_grad(lambda p: p.dense["n"])(fr.Params({}, {"n": i64(1)})),
        TypeError, "`params.dense['n']` cannot be differentiated", "i64[1]"),
    "value_and_grad: dense None": e(lambda: fr.value_and_grad(lambda p: f32())(fr.Params({}, None)), TypeError,
        "`params.dense` cannot be differentiated"),
    "value_and_grad: table": e(lambda: fr.value_and_grad(lambda p: f32())(fr.Params({"t": f32(3)}, {})), TypeError,
        "`params.tables['t']` is not a table"),
    "value_and_grad: vector loss": e(lambda: fr.value_and_grad(lambda p: p.dense)(fr.Params({}, f32(2))), TypeError,
        "the loss is not a scalar", "f32[2]", "loss.mean()"),
    "value_and_grad: loss and aux": e(lambda: fr.value_and_grad(lambda p: (p.dense.sum(), 1))(fr.Params({}, f32(2))),
        TypeError, "the loss is not a scalar", "has_aux=True"),
    "value_and_grad: no aux": e(lambda: fr.value_and_grad(lambda p: p.dense.sum(), True)(fr.Params({}, f32(2))),
        TypeError, "`loss_fn` gave no pair", "got   f32[]", "return loss, aux"),
    "value_and_grad: three": e(lambda: fr.value_and_grad(lambda p: (p.dense.sum(), 1, 2), True)(fr.Params({}, f32(2))),
        TypeError, "`loss_fn` gave no pair", "a tuple of 3"),
    "value_and_grad: a checkpoint": e(lambda: fr.value_and_grad(lambda p: checkpoint(torch.sum, p.dense,
        use_reentrant=False))(fr.Params({}, f32(2))), TypeError, "runs torch.utils.checkpoint", "fr.optim.accumulate"),
    # testing
    "check_grads: no floats": e(lambda: check_grads(lambda x: x, (i64(1),)), TypeError, "no float tensor"),
    "check_invariant: no examples": e(lambda: check_invariant(torch.abs, f32()), ValueError, "no number of examples"),
    "check_invariant: a number": e(lambda: check_invariant(torch.sum, f32(2)), ValueError, "not one of examples",
        "f32[]"),
    "check_invariant_step: parts": e(lambda: check_invariant_step(fr.train_step, fr.Params({}, f32(2)), f32(256, 2)),
        ValueError, "`ranks` cut the batch", "256 examples in 2 parts", "more than 128", "a batch of 1024 examples"),
    "check_invariant_step: unequal": e(lambda: check_invariant_step(fr.train_step, fr.Params({}, f32(2)), f32(1023, 2)),
        ValueError, "`ranks` cut the batch", "1023 examples in 2 parts", "equal parts", "a batch of 1024 examples"),
    "check_invariant_step: no step": e(lambda: check_invariant_step(lambda: 0, fr.Params({}, f32(2)), f32(1024, 2)),
        TypeError, "`step_of` made no training step", "a TrainStep", "functools.partial"),
    "check_adjoint: paths": e(lambda: check_adjoint(lambda x: {"y": x}, lambda y: y["y"], f32(2), {"z": f32(2)}),
        (AssertionError, KeyError), "y"),
    "assert_trees_close: structure": e(lambda: assert_trees_close([f32(1)], (f32(1),)), AssertionError, "structures"),
    # jit(f).lower
    "lower: requires grad": e(lambda: fr.jit(lambda x: x * 2).lower(f32(2).requires_grad_()), TypeError,
        "followed by autograd", "requires_grad of `x`", "detach"),
    "lower: the device meta": e(lambda: fr.jit(lambda x: x * 2).lower(f32(2).to(META)), TypeError,
        "something to follow it", "the device meta", "a call that nothing follows", "fr.jit(fn)"),
    "lower: under vmap": e(lambda: torch.vmap(fr.jit(lambda x: x * 2).lower)(f32(2)), TypeError,
        "something to follow it", "a transform", "fr.jit(fn)"),
    "lower: another shape": e(lambda: fr.jit(lambda x: x * 2).lower(f32(2)).compile()(f32(3)), TypeError,
        "this is another", "`x`: f32[2], then f32[3]", "`lower` once more"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_input_is_named(name):
    """The error has the right type and says what was wrong. A message has funcrec.<call> and the problem first, then
    lines for got and need, even in a KeyError."""
    call, kind, fragments = ROWS[name]
    with pytest.raises(kind) as error:
        call()
    text = str(error.value)
    assert [fragment for fragment in fragments if fragment not in text] == [], text
    if kind in (ValueError, TypeError, KeyError, IndexError):
        assert text.startswith("funcrec.") and ": " in text.splitlines()[0]
        assert "\n  got   " in text and "\n  need  " in text


ALL_AT_ONCE = {
    "from_lengths": (
        lambda: KJT.from_lengths(["a", "a", "b"], i64(1), i64(2, 0), unweighted=["c"]),
        ["names a feature twice", "`unweighted` names keys", "`lengths` does not sum", "not a multiple"],
    ),
    "declared": (lambda: KJT.from_lengths(["a", 3], i64(1), f32(2), weights=i64(3)),
        ["`keys[1]` is not a string", "`lengths` is not a tensor of this dtype", "`weights` is not a tensor"]),
    "offsets": (lambda: JT.from_offsets(i64(1, 2), i64(1, 3, 2)), ["begin at 0", "descends"]),
    "TableConfig": (lambda: TC(3, 0, "x", dtype=torch.int8, initializer=None),
        ["`name`", "`num_embeddings`", "`embedding_dim`", "`dtype`", "`initializer`"]),
    "FeatureConfig": (lambda: FC("", table=1, pooling="x", max_length=-1, hash=3),
        ["`name`", "`table`", "`pooling`", "`max_length`", "`hash`"]),
    "lookup": (
        lambda: fr.lookup(TABLES, IDS, [FC("c", table="t"), FC("a", table="u", weighted=True), FC("d", table="v")]),
        ["feature 'c' has no ids", "feature 'd' has no ids", "'u'", "'v'", "feature 'a' is weighted"],
    ),
    "params": (lambda: fr.value_and_grad(len)(fr.Params({"t": 1, "u": f32(1)}, [1, f32(1), 2])),
        ["['t']", "['u']", "dense[0]", "dense[2]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL_AT_ONCE)
def test_every_problem_is_reported_at_once(name):
    """One error reports every problem of the call."""
    call, fragments = ALL_AT_ONCE[name]
    with pytest.raises((TypeError, ValueError, KeyError)) as error:
        call()
    for fragment in fragments:
        assert fragment in str(error.value), str(error.value)


def test_errors_read_no_device_values():
    """On the meta device a call checks only shapes and dtypes, and reads no value."""
    offsets = i64(5, 2).to(META)
    assert JT.from_offsets(i64(1).to(META), offsets).num_bags == 1
    assert JT.from_lengths(i64(1).to(META), i64(7).to(META)).num_bags == 1
