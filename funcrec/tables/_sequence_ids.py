"""The ids of the rows that `lookup_sequence` returns, in the same bags."""

from collections.abc import Sequence

from funcrec.core import check, kind_of
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, check_ids
from funcrec.tables._checks import feature_key_problems, feature_list_problems, no_feature
from funcrec.tables._configs import FeatureConfig
from funcrec.tables._each import sequences_to_examples
from funcrec.tables._plain import sequence_bags

FLAG = kind_of(bool)


def sequence_ids(
    ids: KeyedJaggedTensor, features: Sequence[FeatureConfig], *, expand: bool = True
) -> dict[str, JaggedTensor]:
    """Return the id of each row of `lookup_sequence`: {feature: JaggedTensor with values i[capacity]}.

    The bags and their buffer are those of the rows, cut to `max_length`. The ids are raw, before a hash; padding is
    zero. Weights are the ids', if the feature is weighted.

    Args:
      expand: the `expand` of `lookup_sequence`.

    Example:
      >>> import torch, funcrec as fr
      >>> history = fr.FeatureConfig("history", table="item", pooling="none", max_length=2)
      >>> ids = fr.KeyedJaggedTensor.from_lists({"history": [[2, 0, 1], [1]]})
      >>> fr.sequence_ids(ids, [history])["history"].to_lists()
      [[2, 0], [1]]

    Source: `need_indices` of TorchRec's EmbeddingCollection.
    """
    call = "funcrec.sequence_ids"
    check(call, FLAG.find("expand", expand), feature_list_problems(features))
    check_ids(call, ids)
    check(call, feature_key_problems(features, ids))
    sequences = [f for f in features if f.pooling == "none"]
    if not sequences and features:
        no_feature(call, features, "none", "lookup")
    out = {f.name: sequence_bags(ids, f) for f in sequences}
    return out if ids.inverse is None or not expand else sequences_to_examples(call, out, ids, sequences)
