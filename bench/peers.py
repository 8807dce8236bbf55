"""The peers' tables: FBGEMM's table-batched embeddings, TorchRec's fused collection, torch's embedding_bag.

A builder raises ImportError if the peer is not installed, and NotImplementedError for a case that it cannot run.
"""

import contextlib
import importlib.util
import warnings

import torch
import torch.nn.functional as F
from cases import TableCase
from torch import Tensor

import funcrec as fr

LR, EPS = 0.01, 1e-8
FBGEMM_RULES = {
    "cpu": {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"},
    "cuda": {
        "sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD", "adam": "ADAM",
        "partial_rowwise_adam": "PARTIAL_ROWWISE_ADAM", "lamb": "LAMB", "partial_rowwise_lamb": "PARTIAL_ROWWISE_LAMB",
    },
}  # fmt: skip
FBGEMM_DTYPES = {  # dtypes that training and lookup both support
    "cpu": {"float32": "FP32", "float16": "FP16"},
    "cuda": {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"},
}


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def sparse_optimizer(rule: str) -> fr.optim.RowOptimizer:
    """Return funcrec's row optimizer with the numbers that the peers use."""
    more = {"rowwise_adagrad_counter": {"half_life": 100.0}}.get(rule, {})
    return getattr(fr.optim, rule)(lr=LR, **more)


def fbgemm_tables(case: TableCase, tables: dict[str, Tensor], device: str, optimizer: str = "EXACT_ROWWISE_ADAGRAD"):
    """Return FBGEMM's TBE with copies of `tables`. optimizer: the name of an EmbOptimType."""
    with quiet():
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    kind = torch.device(device).type
    if case.dtype not in FBGEMM_DTYPES[kind]:
        raise NotImplementedError(f"no {case.dtype} tables on {kind}")
    if case.dim % 4:
        raise NotImplementedError(f"no tables of dim {case.dim}")
    if case.mean and case.weighted:
        raise NotImplementedError("a weighted mean is another number there")
    place = (
        (EmbeddingLocation.HOST, ComputeDevice.CPU) if kind == "cpu" else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    )
    with quiet():
        tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(case.num_rows, case.dim, *place)] * case.num_tables,
            optimizer=EmbOptimType[optimizer], learning_rate=LR, eps=EPS, stochastic_rounding=False,
            weights_precision=getattr(SparseType, FBGEMM_DTYPES[kind][case.dtype]),
            pooling_mode=PoolingMode.MEAN if case.mean else PoolingMode.SUM,
            device=None if kind == "cpu" else torch.device(device),
        )  # fmt: skip
    for own, table in zip(tbe.split_embedding_weights(), tables.values(), strict=True):
        own.data.copy_(table)
    return tbe


def fbgemm_operators():
    """Import FBGEMM, and return torch.ops.fbgemm."""
    with quiet():
        import fbgemm_gpu  # noqa: F401
    return torch.ops.fbgemm


def fbgemm_optimizer(rule: str, device: str) -> str:
    """Return FBGEMM's name of the rule that trains to the same tables."""
    known = FBGEMM_RULES[torch.device(device).type]
    if rule not in known:
        raise NotImplementedError(f"its {torch.device(device).type} operators do not train {rule}")
    return known[rule]


def torch_bags(
    case: TableCase, tables: dict[str, Tensor], ids: fr.KeyedJaggedTensor, *, sparse: bool = False
) -> Tensor:
    """Return the results of F.embedding_bag on each table, joined, as in EmbeddingBagCollection without FBGEMM."""
    out = []
    for n in case.names:
        bags = ids[n]
        scale = None if bags.weights is None else bags.weights.to(tables[n].dtype)
        mode = "mean" if case.mean else "sum"
        ends = {"include_last_offset": True, "sparse": sparse, "mode": mode, "per_sample_weights": scale}
        out.append(F.embedding_bag(bags.values, tables[n], bags.offsets, **ends))
    return torch.cat(out, 1)


def torch_ids(case: TableCase, ids: fr.KeyedJaggedTensor) -> dict[str, fr.JaggedTensor]:
    return feature_ids(ids, case.names)


def feature_ids(ids: fr.KeyedJaggedTensor, keys: list[str]) -> dict[str, fr.JaggedTensor]:
    """Return the ids of each key in a buffer of its own, made once, for embedding_bag."""
    parts = {}
    for n in keys:
        first, last = ids.bag_range(n)
        begin, end = int(ids.offsets[first]), int(ids.offsets[last])
        weights = None if ids.weights is None else ids.weights[begin:end]
        parts[n] = fr.JaggedTensor(ids.values[begin:end], ids.offsets[first : last + 1] - begin, weights)
    return parts


def torch_optimizer(rule: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return the torch.optim optimizer that takes sparse gradients and trains to the same tables."""
    if rule == "sgd":
        return torch.optim.SGD(parameters, lr=LR)
    if rule == "adagrad":
        return torch.optim.Adagrad(parameters, lr=LR, eps=EPS)
    if rule == "adam":
        # SparseAdam adds eps to √v before the bias correction. With this scale eps equals funcrec's in the first step,
        # which the law compares
        return torch.optim.SparseAdam(parameters, lr=LR, eps=EPS * (1 - 0.999) ** 0.5)
    raise NotImplementedError(f"torch.optim has no {rule} for sparse gradients")


def torchrec_tables(features: list, tables: dict[str, Tensor], device: str):
    """Return TorchRec's FusedEmbeddingBagCollection with copies of `tables` and row-wise Adagrad."""
    with quiet():
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    if len({f.table for f in features}) != len(features):
        raise NotImplementedError("written for one feature per table")
    configs = [
        EmbeddingBagConfig(
            name=f.table, num_embeddings=tables[f.table].shape[0], embedding_dim=tables[f.table].shape[1],
            feature_names=[f.name],
        )
        for f in features
    ]  # fmt: skip
    with quiet():
        bags = FusedEmbeddingBagCollection(configs, RowWiseAdagrad, {"lr": LR, "eps": EPS}, device=torch.device(device))
    for name, own in bags.embedding_bags.items():
        own.weight.data.copy_(tables[name])
    return bags


def torchrec_ids(ids: fr.KeyedJaggedTensor):
    """Return the same ids in TorchRec's type, with lengths and offsets already made."""
    with quiet():
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    return KeyedJaggedTensor(list(ids.keys), ids.values, ids.weights, lengths=ids.offsets.diff(), offsets=ids.offsets)


@contextlib.contextmanager
def quiet():
    """Hide the logs and warnings that FBGEMM and TorchRec print when they are imported and built."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
