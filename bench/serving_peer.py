"""Makes TorchRec's form for a server: a DLRM with quantised tables, sharded on one CPU, traced and scripted
(torchrec.inference), with funcrec's parameters.

    scripted({"float_features", "id_list_features.lengths", "id_list_features.values"})["default"] = predict(params, x)
"""

import logging
from pathlib import Path

import torch
from peers import quiet

import funcrec as fr

DTYPES = {"int8": torch.qint8, "int4": torch.quint4x2}
LIBRARIES = ("fbgemm_gpu_tbe_inference", "fbgemm_gpu_tbe_cache", "fbgemm_gpu_tbe_training_backward", "fbgemm_gpu_py")


def scripted(params: fr.Params, sample: fr.Batch, dtype: str, path: Path) -> torch.jit.ScriptModule:
    """Return torch.jit.script of TorchRec's DLRM, made as DLRMPredictFactory does, and save it at `path`."""
    logging.disable(logging.WARNING)
    with quiet():
        import torchrec
        from torchrec.distributed.global_settings import set_propogate_device
        from torchrec.fx import Tracer
        from torchrec.inference import modules
        from torchrec.inference.dlrm_predict import DLRMPredictModule

    set_propogate_device(True)
    keys, cpu = list(sample.ids.keys), torch.device("cpu")
    configs = [
        torchrec.EmbeddingBagConfig(
            name=f"t_{k}", embedding_dim=x.shape[1], num_embeddings=x.shape[0], feature_names=[k]
        )
        for k, x in zip(keys, params.tables.values(), strict=True)
    ]
    widths = lambda layers: [own["weight"].shape[0] for own in layers]
    over = [*params.dense["mlp"]["linear"], params.dense["out"]]
    model = DLRMPredictModule(
        embedding_bag_collection=torchrec.EmbeddingBagCollection(configs, device=cpu),
        dense_in_features=sample.dense.shape[1],
        dense_arch_layer_sizes=widths(params.dense["bottom"]["linear"]),
        over_arch_layer_sizes=widths(over),
        id_list_features_keys=keys,
        dense_device=cpu,
    )
    take_parameters(model.predict_module, params)
    quantised = modules.quantize_inference_model(model, quantization_dtype=DTYPES[dtype])
    weights = modules.get_table_to_weights_from_tbe(quantised)
    sharded, _ = modules.shard_quant_model(quantised, compute_device="cpu", sharding_device="cpu")
    modules.assign_weights_to_tbe(sharded, weights)
    batch = inputs(sample)
    with torch.no_grad():
        sharded(batch)
        graph = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]).trace(sharded)
        made = torch.jit.script(torch.fx.GraphModule(sharded, graph))
        made(batch)
    made.save(str(path))
    return made


def inputs(batch: fr.Batch) -> dict[str, torch.Tensor]:
    return {
        "float_features": batch.dense,
        "id_list_features.lengths": batch.ids.lengths.int(),
        "id_list_features.values": batch.ids.values,
    }


def take_parameters(dlrm: torch.nn.Module, params: fr.Params) -> None:
    """Copy the parameters into TorchRec's DLRM.

    TorchRec orders the products of pairs by triu_indices, and funcrec by tril_indices.
    """
    bags = dlrm.sparse_arch.embedding_bag_collection.embedding_bags
    own = [*params.dense["bottom"]["linear"], *params.dense["mlp"]["linear"], params.dense["out"]]
    linear = [m for part in (dlrm.dense_arch, dlrm.over_arch) for m in part.modules() if isinstance(m, torch.nn.Linear)]
    count, width = len(params.tables) + 1, next(iter(params.tables.values())).shape[1]
    number = torch.zeros(count, count, dtype=torch.int64)
    number[tuple(torch.tril_indices(count, count, -1))] = torch.arange(count * (count - 1) // 2)
    pairs = number.T[tuple(torch.triu_indices(count, count, 1))]
    columns = torch.cat([torch.arange(width), width + pairs])
    with torch.no_grad():
        for bag, x in zip(bags.values(), params.tables.values(), strict=True):
            bag.weight.copy_(x)
        for module, p in zip(linear, own, strict=True):
            first = module.weight.shape[1] == len(columns) and p is params.dense["mlp"]["linear"][0]
            module.weight.copy_(p["weight"][:, columns] if first else p["weight"])
            module.bias.copy_(p["bias"])


def libraries() -> list[Path]:
    """Return the paths of FBGEMM's operator libraries, which a process without Python loads before the script."""
    with quiet():
        import fbgemm_gpu

    folder = Path(fbgemm_gpu.__file__).parent
    return [folder / f"{name}.so" for name in LIBRARIES]
