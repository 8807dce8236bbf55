"""The model of MLPerf inference's DLRMv3: HSTU over a billion items.

5 layers of 4 heads, qk 128, linear 128, dim 512; tables of f16
"""

import torch

from funcrec.core import Count, remade, typed
from funcrec.models._hstu import HstuRanker, hstu_ranker
from funcrec.tables import FeatureConfig, TableConfig, modulo

DLRMV3_ROWS = {"item": 1_000_000_000, "category": 128, "user": 10_000_000}


@remade
@typed
def mlperf_dlrmv3(
    max_rows: Count | None = None, *, embedding_dim: Count = 512, max_history: Count = 2048, num_candidates: Count = 32
) -> HstuRanker:
    """Return the ranker of MLPerf inference v6.0, DLRMv3, over the columns of `fr.data.generated_histories`.

    Here positions and times are biases of the attention; the reference adds vectors for them to the input. The
    reference has an MLP for items and one for categories; this model has one for both.

    Args:
      max_rows: larger tables are cut to this many rows, and their ids hashed by modulo. None keeps 1,010,000,128 rows.
      max_history, num_candidates: the most positions of a history, and candidates of a request.

    Example:
      >>> import funcrec as fr
      >>> model = fr.models.mlperf_dlrmv3()
      >>> params = model.init(fr.key(0).to("meta"))
      >>> round(fr.tree.nbytes(params.tables) / 1e12, 2), fr.models.num_parameters(fr.Params({}, params.dense))
      (1.03, 11217233)

    Source: meta-recsys/generative-recommenders, dlrm_v3/configs.py, "streaming"; MLCommons inference v6.0.
    """
    rows = {n: size if max_rows is None else min(size, max_rows) for n, size in DLRMV3_ROWS.items()}
    tables = [TableConfig(n, size, embedding_dim, dtype=torch.float16) for n, size in rows.items()]
    hashed = {n: modulo() if rows[n] < size else None for n, size in DLRMV3_ROWS.items()}

    def sequences(prefix: str, most: int) -> list[FeatureConfig]:
        return [
            FeatureConfig(f"{prefix}{n}", table=n, pooling="none", max_length=most, hash=hashed[n])
            for n in ("item", "category")
        ]

    return hstu_ranker(
        tables,
        history=sequences("", max_history),
        candidates=sequences("candidate_", num_candidates),
        context=[FeatureConfig("user", table="user", max_length=1, hash=hashed["user"])],
        action="action", time="time", query_time="query_time", action_std=5.0,
        dim=512, num_layers=5, num_heads=4, qk_dim=128, linear_dim=128, hidden=256, head=512,
        normalizer=16384.0, num_positions=8192, num_times=64, input_dropout=0.2, dropout=0.1, concatenate=True,
    )  # fmt: skip
