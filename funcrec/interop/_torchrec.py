"""from_torchrec and to_torchrec: convert values by their types."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from funcrec.core import PARTS, check, describe, fail, kind_of, typed
from funcrec.interop._configs import from_configs, pair_of, to_configs
from funcrec.interop._managed import from_managed, is_managed
from funcrec.interop._quantized import from_quantised, is_quantised
from funcrec.interop._values import FROM, TO, is_all
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from funcrec.kinds import QuantizedTables
from funcrec.tables import Params
from funcrec.train import TrainState

COLLECTIONS = ("embedding_bag_configs", "embedding_configs")  # the modules' methods that return configs


def need_torchrec(call: str) -> None:
    """Raise if TorchRec cannot be imported. It is not a dependency of funcrec."""
    try:
        import torchrec  # noqa: F401
    except ImportError:
        need, hint = "torchrec and fbgemm_gpu", "pip install fbgemm-gpu-cpu, then pip install --no-deps torchrec"
        got = "no module torchrec"
        fail(call, "TorchRec is not installed.", got=got, need=need, hint=hint, kind=ModuleNotFoundError)


@typed
def from_torchrec(x: Any, *, weighted: bool = False) -> Any:
    """Return a value of TorchRec as a value of funcrec. Both values share tensors.

    | theirs | ours |
    | --- | --- |
    | KeyedJaggedTensor, also with a stride for each key and inverse indices | KeyedJaggedTensor |
    | JaggedTensor; a dict of them | JaggedTensor; a dict |
    | KeyedTensor | KeyedTensor |
    | a list of EmbeddingBagConfig or of EmbeddingConfig, or one such config | (tables, features) |
    | an EmbeddingBagCollection or EmbeddingCollection | (tables, features); for weights `load_torchrec_state_dict` |
    | a ManagedCollisionEmbeddingBagCollection or ManagedCollisionEmbeddingCollection | {table: VocabularyConfig} |
    | a quantised collection of `torchrec.quant` | (QuantizedTables, features) with copied rows |

    Args:
      weighted: for configs, whether the collection `is_weighted`. Configs do not contain this, a collection does.

    Returns:
      Features come in the order of the collection's answer, and have its keys: `column@table` for a column that
      several tables read. In a FusedEmbeddingBagCollection of several poolings the columns have another order than the
      keys, and the features have the order of the columns. If a value has only lengths, the function makes offsets, and
      only these are new tensors. For managed collisions each table has a vocabulary without ids, as `fr.dynamic_tables`
      takes it, with room for the ids of the module. `load_torchrec_state_dict` loads ids and rows.

    Raises:
      TypeError, ValueError: if a value has no counterpart: batches of several ranks in one value, keys elsewhere
        than in columns, pruned or virtual tables, an initial distribution that `fr.Initializer` cannot express; managed
        collision modules that hash ids, filter them by a threshold, or have a policy of their own.

    Law: `to_torchrec(from_torchrec(x))` equals x, and `from_torchrec(to_torchrec(x))` equals x without padding.

    Example:
      >>> import torch, funcrec as fr
      >>> from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
      >>> theirs = KeyedJaggedTensor(["clicked"], torch.tensor([1, 2, 7]), lengths=torch.tensor([2, 0, 1]))
      >>> ids = fr.interop.from_torchrec(theirs)
      >>> ids.to_lists(), ids.values is theirs.values()
      ({'clicked': [[1, 2], [], [7]]}, True)
      >>> fr.interop.from_torchrec(EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"]))[1]
      (FeatureConfig(name='clicked', table='item', pooling='sum', max_length=None, weighted=False, hash=None,
        column=None),)
    """
    call = "funcrec.interop.from_torchrec"
    theirs = sys.modules.get("torchrec")  # a caller with a value of TorchRec has imported TorchRec
    if theirs is not None:
        own = theirs.sparse.jagged_tensor
        for name, made in FROM.items():
            if isinstance(x, getattr(own, name)):
                return made(call, x)
        if is_all(x, own.JaggedTensor):
            return {k: FROM["JaggedTensor"](call, v) for k, v in x.items()}
        configs = theirs.modules.embedding_configs
        kinds = (configs.EmbeddingBagConfig, configs.EmbeddingConfig)
        if isinstance(x, kinds):
            return from_configs(call, [x], weighted)
        if isinstance(x, Sequence) and x and all(isinstance(c, kinds) for c in x):
            return from_configs(call, x, weighted)
        if is_managed(x):
            return from_managed(call, x)
        for name in COLLECTIONS:
            if hasattr(x, name):
                is_weighted = cast(Any, x).is_weighted() if hasattr(x, "is_weighted") else False
                if is_quantised(x):
                    return from_quantised(call, x, getattr(x, name)(), is_weighted)
                return from_configs(call, in_order(x, getattr(x, name)()), is_weighted)
    fail(
        call, "`x` is not one of TorchRec's values.", got=describe(x),
        need="its KeyedJaggedTensor, JaggedTensor, KeyedTensor, configs of embeddings, or a collection of them",
        hint="x=torchrec.KeyedJaggedTensor(keys, values, lengths=lengths)", kind=TypeError,
    )  # fmt: skip


def in_order(module: Any, configs: Sequence[Any]) -> Sequence[Any]:
    """Return the configs in the order of the columns of the module's answer.

    A FusedEmbeddingBagCollection groups tables by pooling, but names the columns in the order of the configs.
    """
    fused = sys.modules.get("torchrec.modules.fused_embedding_modules")
    if fused is None or not isinstance(module, fused.FusedEmbeddingBagCollection):
        return configs
    place = {name: i for i, name in enumerate(module.embedding_bags)}
    return sorted(configs, key=lambda config: place[config.name])


def to_torchrec(
    x: KeyedJaggedTensor | JaggedTensor | KeyedTensor | Mapping[str, JaggedTensor] | tuple[Any, ...],
    *,
    weighted: bool = False,
) -> Any:
    """Return a value of funcrec as a value of TorchRec. It is the inverse of `from_torchrec`, and both share tensors.

    Args:
      x: a KeyedJaggedTensor, a JaggedTensor or a dict of them, a KeyedTensor, or (tables, features).
      weighted: for configs, whether the features are weighted. If they are, give the collection `is_weighted=True`.

    Returns:
      The value of TorchRec. For (tables, features) it is a list of configs, for an EmbeddingCollection if the features
      are sequences, else for an EmbeddingBagCollection. TorchRec has no padding: a view cuts it off, for which the
      function reads offsets[-1] on the host.

    Raises:
      TypeError, ValueError: if TorchRec has no counterpart: for hashed features, max_length, tables of f64, tables
        whose features are pooled in two ways, features in another order than the answer. Also for QuantizedTables and
        Params: `to_torchrec_state_dict` writes the numbers of such values to a module of such configs.

    Example:
      >>> import funcrec as fr
      >>> ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], []], "user": [[7], [8]]})
      >>> fr.interop.to_torchrec(ids.pad_to(9)).values()
      tensor([1, 2, 7, 8])
      >>> tables, features = (fr.TableConfig("item", 10, 4),), (fr.FeatureConfig("clicked", table="item"),)
      >>> config, = fr.interop.to_torchrec((tables, features))
      >>> config.name, config.feature_names, config.pooling.value
      ('item', ['clicked'], 'SUM')
    """
    call = "funcrec.interop.to_torchrec"
    check(call, kind_of(bool).find("weighted", weighted))
    pair, made = pair_of(x), TO.get(type(x))
    if made is None and pair is None and not is_all(x, JaggedTensor):
        first = x[0] if isinstance(x, tuple | list) and x else x
        if isinstance(first, QuantizedTables | Params | TrainState):
            need = "configs, (tables, features): a module is made of these, and takes numbers by its state dict"
            hint = "module.load_state_dict(fr.interop.to_torchrec_state_dict(tables, module.state_dict()))"
            got = f"the numbers of {describe(first)}"
            fail(call, "`x` has numbers, and TorchRec's configs have none.", got=got, need=need, hint=hint,
                kind=TypeError)  # fmt: skip
        fail(
            call, "`x` has no counterpart.", got=describe(x),
            need="a KeyedJaggedTensor, a JaggedTensor, a KeyedTensor or (tables, features)",
            hint='x=fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], []]})', kind=TypeError,
        )  # fmt: skip
    if made is not None:
        check(call, PARTS[type(x)](x, "x"))
    need_torchrec(call)
    if pair is not None:
        return to_configs(call, pair[0], pair[1], weighted)
    return {k: to_torchrec(v) for k, v in cast(Any, x).items()} if made is None else made(x)
