"""Row optimizers equal the table-batched embeddings of FBGEMM on the CPU, which train in f32."""

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

pytest.importorskip("fbgemm_gpu")
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

ROWS, DIM, STEPS, LR, EPS = 7, 8, 5, 0.1, 1e-6
ROWWISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD


def counter(mode):
    definition = CounterBasedRegularizationDefinition(counter_weight_decay_mode=mode, counter_halflife=3)
    return {
        "weight_decay": 0.1,
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "counter_based_regularization": definition,
    }


COWCLIP = {
    "weight_decay": 0.1,
    "weight_decay_mode": WeightDecayMode.COWCLIP,
    "cowclip_regularization": CowClipDefinition(
        counter_weight_decay_mode=CounterWeightDecayMode.L2,
        # FBGEMM's count is then 1, as our count is for distinct ids
        counter_halflife=0,
        weight_norm_coefficient=0.3,
        lower_bound=1e-2,
    ),
}
PAIRS = {  # name -> (our optimizer, that of FBGEMM, its arguments, whether ids repeat in a batch)
    "sgd": (fr.optim.sgd(LR), EmbOptimType.EXACT_SGD, {}, True),
    "adagrad": (fr.optim.adagrad(LR, eps=EPS), EmbOptimType.EXACT_ADAGRAD, {}, True),
    "rowwise_adagrad": (fr.optim.rowwise_adagrad(LR, eps=EPS), ROWWISE, {}, True),
    "counter_l2": (
        fr.optim.rowwise_adagrad_counter(LR, eps=EPS, half_life=3, weight_decay=0.1),
        ROWWISE,
        counter(CounterWeightDecayMode.L2),
        True,
    ),
    "counter_decoupled": (
        fr.optim.rowwise_adagrad_counter(LR, eps=EPS, half_life=3, weight_decay=0.1, decay="decoupled"),
        ROWWISE,
        counter(CounterWeightDecayMode.DECOUPLE),
        True,
    ),
    "cowclip": (
        fr.optim.rowwise_adagrad_cowclip(LR, eps=EPS, clip_ratio=0.3, lower_bound=1e-2, weight_decay=0.1),
        ROWWISE,
        COWCLIP,
        False,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_trains_the_same_rows(name):
    """k steps of sum-pooled lookups give the table and the accumulators of FBGEMM."""
    ours, optimizer, more, repeated = PAIRS[name]
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=optimizer, learning_rate=LR, eps=EPS, **more,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(ROWS, DIM, generator=draw)
    tbe.split_embedding_weights()[0].copy_(table)
    tables, slots = {"t": table.clone()}, ours.init({"t": table})
    for step in range(STEPS):
        lengths = torch.randint(0, 4 if repeated else 2, (6,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = (
            torch.randint(0, ROWS - 1, (24,), generator=draw) if repeated else torch.randperm(ROWS - 1, generator=draw)
        )
        ids = ids[: int(offsets[-1])]
        d_out = torch.randn(6, DIM, generator=draw)
        tbe(ids, offsets).backward(d_out)
        entries = fr.RowGrads.from_entries(ids, d_out.repeat_interleave(lengths, 0), num_embeddings=ROWS)
        tables, slots = ours.update({"t": entries}, slots, tables, step)
    assert_trees_close(tables["t"], tbe.split_embedding_weights()[0].detach(), rtol=1e-5, atol=1e-6)
    if "sum" in slots["t"]:
        state = tbe.split_optimizer_states()[0]
        theirs = state[0] if isinstance(state, (tuple, list)) else state["sum"]
        assert_trees_close(slots["t"]["sum"].flatten(), theirs.flatten(), rtol=1e-5, atol=1e-6)
