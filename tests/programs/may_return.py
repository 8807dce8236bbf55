"""Wrong arguments that the sweep accepts: those whose class the annotation names, and the rows below.

Each row has its reason.

A row has a reason, a pattern of calls, a pattern of paths and the wrong values that may pass (`sweep.wrong_values`).
None stands for all wrong values.
"""

import re
from typing import NamedTuple

NUMBERS = {"f32[1, 1, 1, 1]", "f32[0]", "f64[]"}
TENSORS = NUMBERS | {"bool[3]", "c64[2]", "i64[17]", "meta"}
FLOATS = NUMBERS | {"meta", "()"}


class Row(NamedTuple):
    why: str
    calls: str
    paths: str
    wrong: frozenset[str] | None = None


MAY_RETURN = (
    # trees, where only the structure counts
    Row("a mapped function takes trees of any tensors", r"\.(un)?shard|\.shard_map", r"tree.*|x",
        TENSORS - {"f64[]"} | {"()", "JaggedTensor"}),
    Row("sums, means and extrema take numbers", r"\.p(sum|sum_invariant|mean|max|min)", "x",
        {"7", "-1", "0", "True", "nan", "{'q': 1}"}),
    Row("collectives take trees of tensors", r"\.(p\w+|all_\w+)", "x", TENSORS | {"()", "JaggedTensor"}),
    Row("trees of anything", r"tree\.(copy|flatten|leaves|nbytes|num_parameters|paths|structure)", r"tree.*"),
    Row("tables of a delta are not read among parameters", r"\.write_delta", r"params\.tables"),
    Row("None: dense parameters stay", r"\.write_delta", "params", {"None"}),
    Row("a prediction reads of its parameters what it likes", r"\.export", r"params\.tables",
        NUMBERS | {"bool[3]", "i64[17]", "()", "JaggedTensor"}),
    Row("tensors by name", r"\.save_safetensors", r"tensors\[.*", NUMBERS | {"bool[3]", "i64[17]"}),
    Row("a dry run on other ranks, with fewer estimates", r"\.dry_run", r"mesh\[.*|plan|backend|rank",
        {"7", "0", "None"}),
    Row("a text", r"\.save_safetensors", r"metadata\[.*", {"'no'"}),
    Row("no rows have no answers", r"\.predict", r"rows\[.*", {"()", "f32[0]"}),
    Row("a log of up to 7 rows", r"\.logged", r"rows\[.*", {"7"}),
    Row("parameters are trees of floats",
        r"\.((private_)?step|sweep)_init|optim.dense_init|models.(num_parameters|summary)", r"params.*", FLOATS),
    Row("columns are read where they are shown", r"\.SweepTable", ".*", {"f32[0]", "meta"}),
    Row("a tree of stacked tensors", r"\.member", r"states.*", TENSORS - NUMBERS),
    Row("integers are numbers of members", r"\.sweep", r"hyper\['lr'\]", {"i64[17]"}),
    Row("a carry and its batches are trees of tensors", r"\.scan", "state|batches", TENSORS),
    Row("a checkpoint is a tree of plain values", r"\.save(_ranks)?", r"tree.*"),
    Row("weights are a tree of any tensors", r"\.save_weights", r"params.*"),
    Row("what is not a jagged value has no padding", r"testing.\w+_padding", "tree"),
    Row("a mapped function takes leaves of any kind", r"tree\.map", "fn", {"function"}),
    Row("an item is a tree of anything", "data.prefetch", r"items.*"),
    # arguments that this function does not read
    Row("a loss reads of its batch what it likes",
        r"\.((example_|private_)?grad_fn|(remat|invariant)_fn|step|step_on_mesh|swept|private_step_run)",
        r"batch\.(label|dense|weight)"),
    Row("any function of parameters", r"\.of_rows", "fn", {"function"}),
    Row("a product's vector is any tree of floats", r"\.(lanczos|conjugate_gradient)", "like|b",
        {"f32[1, 1, 1, 1]", "f64[]", "meta"}),
    Row("a reduction begins with anything", "tree.reduce", "initial", None),
    Row("sizes are any integers >= 0", "random.bernoulli", r"shape\[0\]", {"7", "0"}),
    Row("one probability", "random.bernoulli", "p", {"f64[]"}),
    Row("rows of any tensor are put in another order", "random.permutation", "x",
        {"f32[1, 1, 1, 1]", "bool[3]", "c64[2]", "i64[17]", "f32[0]", "meta"}),
    Row("classes are the last dimension", "random.categorical", "logits", {"f32[1, 1, 1, 1]"}),
    Row("inputs are any floats, of any function", r"testing.(check_transforms|transform_cells)", "x|f",
        {"f32[1, 1, 1, 1]", "f32[0]", "f64[]", "function"}),
    Row("a batch is a tree of any tensors", r"testing.check_invariant", "batch",
        {"f32[1, 1, 1, 1]", "c64[2]", "i64[17]"}),
    Row("no transform at all", r"testing.(check_transforms|transform_cells|law)", "modes|may_raise", {"()"}),
    Row("an example is read when its tests run", "testing.law", r"example.*"),
    Row("a tolerance is any number from 0 on", "testing.law", "rtol|atol", {"7", "0"}),
    Row("a reference is any function", "testing.law", "reference", {"function", "class"}),
    Row("places of arguments that a call may have", r"\.value_and_grad", r"argnums\[.*", {"7", "0"}),
    Row("a branch takes what it takes", r"\.cond", "x|true_fn|false_fn",
        TENSORS - {"numpy", "torchrec", "JaggedTensor"} | {"function", "class", "f64[]", "meta"}),
    Row("a predicate may be a bool", r"\.cond", "pred", {"True"}),
    Row("a carry is a tree of tensors and numbers", r"\.(while|fori)_loop", "init",
        NUMBERS | {"7", "-1", "0", "nan", "c64[2]", "i64[17]", "f32[0]", "f64[]", "meta"}),
    Row("any value without tensors, or a tensor, has a text", r"\.debug_print", "x", None),
    Row("a format leaves out what it does not name", r"\.debug_print", "text", {"'no'"}),
    Row("a bound is any int", r"\.fori_loop", "lower|upper", {"7", "-1", "0"}),
    Row("a function takes what it takes", r"\.eval_shape", "x|fn", TENSORS | {"function", "f64[]", "meta"}),
    Row("a batch of no examples gets noise alone", r"\.private_(grad_fn|step_run)", "batch", {"f32[0]"}),
    Row("no dense leaves", r"\.(sum_examples|example_norms|gradient_noise_scale)", r"grads\.dense", {"()"}),
    Row("a model's answer does not depend on labels",
        r"models.(apply|train_apply|query|towers|ranker_(apply|train|encode|query|score))|Package.call",
        r"batch\.(label|weight)",
        TENSORS),
    Row("dense parameters go through as they are", r"\.(gather_state|sync_replicas)", r"state\.(dense|dense_opt)"),
    Row("a model's other parameters go through", "models.merge_stats", r"dense.*"),
    Row("no statistics at all", "models.merge_stats", r"aux\['stats'\]", {"None", "()"}),
    Row("a label is any hashable", r"\.shard_tables", r"labels\[.*"),
    Row("bags travel with values of any form", r"interop\.to_\w+", r"x\.(values|offsets)", TENSORS - {"f64[]", "meta"}),
    Row("numbers are kept in the state's dtype", r"interop\.(module_apply|\w+state_dict)", r".*", {"f64[]"}),
    Row("None: there are no candidates", "nn.hstu_apply", "num_targets", {"None"}),
    # values that only `validate` reads
    Row("as many offsets as zeros are empty bags", "nn.hstu_keep", r"x\.offsets", {"i64[17]"}),
    Row("whether offsets fit the values is in their values", ".*", r"(ids|bags|tree)\.(values|offsets)",
        TENSORS - {"f64[]", "meta"}),
    Row("values of a feature are of any dtype until a table is looked up", r"(Keyed)?JaggedTensor.*", "values",
        {"bool[3]", "c64[2]"}),
    Row("a bag of rows", r"(Keyed)?JaggedTensor.from_lists", r"(lists|weights)\[.*",
        {"c64[2]", "numpy", "f32[0]", "()"}),
    Row("keys are any texts, and may be none", r"data\.hash_keys", r"column.*", {"()", "'no'"}),
    Row("ids are any integers before they are hashed", r"\.hash_rows|\.fold_in", "ids|data", {"i64[17]"}),
    # numbers
    Row("a number may be a tensor of one", r"optim.*|RowGrads.scale", ".*", {"f64[]"}),
    Row("a parameter of a loss, of clipping or of a solver may be a tensor of one",
        r"losses\.\w+|RowGrads.clip\w*|\.clip_by_global_norm\w*|\.private_(grads|step)\w*|\.conjugate_gradient",
        r"delta|temperature|calibration|weights\[.\]|max_norm|max_value|noise_multiplier|damping", {"f64[]"}),
    Row("a factor of NaN marks a gradient", "RowGrads.scale", "factor", {"nan"}),
    Row("a leaf's gradient is rounded to its dtype", "optim.dense_update", r"grads.*", {"f64[]"}),
    Row("an integer of its range, where the sweep sees no annotation",
        r"\.(Mesh_emulated|initialize|ragged_all_to_all)|optim.*",
        "a|b|shape.*|start|num_embeddings|capacity|step", {"7", "0", "i64[17]"}),
    Row("an axis of 7 ranks", r"\.plan", r"mesh\['a'\]", {"7"}),
    Row("a row that was seen 7 times, or never", r"\.TableConstraint", r"row_counts\[.*", {"7", "0"}),
    Row("a column is any vector of numbers", r"data.split_by_(time|group)", "time|group", {"i64[17]"}),
    Row("a list of values", r"data\.(fit|apply\w*)", r"column(\[.*)?",
        {"()", "None", "'no'", "7", "-1", "0", "True", "bool[3]", "i64[17]"}),
    Row("edges that ascend", "data.bucketize_edges", r"edges\[.*", {"-1", "0", "7"}),
    Row("a dim of 7", "data.configs", r"embedding_dim\[.*", {"7"}),
    Row("another row of the data", "data.collated", r"items\[.*", {"7", "0"}),
    Row("counts of any kind of numbers", "data.(log_q|popularity_negatives)", "counts", {"i64[17]"}),
    Row("rows behind the last bag are padding", r"\.top_k|metrics.recall_update", r"(exclude|labels)\.values",
        {"i64[17]"}),
    Row("a number, or none", "data.apply_numbers", r"column.*", {"f32[0]", "nan"}),
    Row("one process has all rows", r"loop\.(own_part|all_parts)", "x", TENSORS),
    Row("one of theirs", r"interop\.from_torchrec", "x", {"torchrec"}),
    Row("known ids that ascend", "data.(uniform|popularity)_negatives", r"known\.values", {"i64[17]"}),
    Row("a mask is any booleans", r"\.bag_filter", "mask", {"bool[3]"}),
    Row("ids are any integers", r"\.(find|admit)", "ids", {"i64[17]"}),
    Row("an id is any integer", r"\.drop_ids", r"padding\['x'\]", {"7", "-1", "0"}),
    Row("a length of 7", r"nn.position_weights_of_keys", r"max_length\['x'\]", {"7"}),
    Row("a shape", "data.draw", r"shape\[1\]", {"7", "0"}),
    Row("a core of 7", "data.k_core", r"k\[.*", {"7"}),
    Row("0 of a range that begins there, and a larger bound", "data.random_rows", r"ids_per_bag.*", {"0", "7"}),
    Row("tables and parameters are known at `init`", "optim.freeze.*", r"(tables|paths)\[0\]", {"'no'"}),
    Row("a parameter may have no average", "optim.averaged", r"state\[.*", {"{'q': 1}"}),
    Row("torch's own classes take what they take", "optim.dense", "lr|weight_decay",
        {"7", "0", "True", "function", "class"}),
    Row("a table on the meta device has its shape, and so have its codes", r"\.(fake_)?quantize", r"tables\[.*",
        {"meta"}),
    Row("shapes alone are computed",
        r"optim.init|nn.(dot_interaction|factorization_machine)|metrics.auc_error|data.transform_dense", ".*",
        {"meta"}),
    Row("elementwise", r"nn.(dropout|dot_interaction|factorization_machine)|data.transform_dense", "x",
        TENSORS - {"c64[2]", "meta"}),
    Row("labels may be booleans, weights too", "metrics.*", r"labels|labels\[0\]|weights", {"bool[3]", "None"}),
    Row("labels may be booleans", "losses.*", "label", {"bool[3]"}),
    Row("a weight of a task is any number >= 0", "losses.multi_task", r"weights\[.*", {"7", "0"}),
    Row("None weighs all alike", "losses.loss_of_tasks", "weight", {"None"}),
    Row("settings are any plain values by name", r"\.fit", "settings", {"{'q': 1}"}),
    Row("a folder has any name", r"loop.tensorboard", "writer", {"'no'"}),
    Row("one tensor without a table", r"\.global_norm", "more", NUMBERS),
    Row("a sum in another float dtype", "metrics.*", r"(a|b|state)\[.*", {"f64[]"}),
    # positions, names, defaults
    Row("positions count from both ends; none is none", r"(Keyed)?(Jagged)?Tensor.(getitem|bags)", r"which.*",
        {"-1", "0", "()"}),
    Row("None is the default", r".*", r"weights(\['x'\])?|dtype|device|axis_names|capacity|like|y|a|b", {"None"}),
    Row("a name of an axis or a column", r"\.P|\.Plan|\.sync_replicas|data.criteo_npy",
        r"a|b|replicas\[0\]|greatest\[0\]|keys.*", {"'no'", "()"}),
    Row("a plan reads of a mapping its names", r"\.Plan_uniform", "tables", {"{'q': 1}"}),
    Row("what it is", r"\.shard_map", "check", {"True"}),
)  # fmt: skip


def reasons(call: str, path: str, wrong: str) -> list[Row]:
    return [
        row for row in MAY_RETURN
        if re.fullmatch(row.calls, call) and re.fullmatch(row.paths, path) and (row.wrong is None or wrong in row.wrong)
    ]  # fmt: skip
