"""On real ranks, example weights and evaluation give the results of one process."""

import pytest
import torch
from programs import loops

import funcrec as fr
from funcrec.testing import assert_trees_close


@pytest.mark.parametrize("weight", [[3, 1, 2, 0, 1, 1, *[0] * 6], [0.5, 0, 1] * 4])
def test_the_mean_over_ranks_is_the_weighted_mean(weight, ranks):
    """A step on two ranks, one of which may hold only padding, uses Σ w l / Σ w over all examples."""
    want = loops.weighted_step(weight)
    for got in ranks(2).run(loops.weighted_step_of_ranks, weight):
        assert_trees_close(got, want, rtol=1e-5, atol=1e-6)


def test_all_ranks_know_the_metrics_of_all_examples(ranks):
    """Each rank evaluates its own examples and returns the metrics of all examples. Ranks with different numbers of
    examples raise."""
    weight = [1, 2, 0, 1] * 3
    first, second = ranks(2).run(loops.evaluated_on_ranks, weight)
    assert first == second and {"both.mse", "both.mae", "sums.0", "sums.1"} <= {*first}
    assert first == pytest.approx(loops.evaluated(weight))
    assert all("[12, 24] examples" in text for text in ranks(2).run(loops.refused, weight))


@pytest.mark.parametrize("num_steps", [5, 40])
def test_a_signal_of_one_rank_ends_all(num_steps, ranks, tmp_path):
    """A signal to one rank is raised on every rank after the same step. That step is the next step that asks for
    signals, or the last step. The checkpoint is written before."""
    ended = ranks(2).run(loops.interrupted, str(tmp_path / "run.pt"), num_steps)
    assert ended[0] == ended[1] and ended[0][0] == 143
    assert ended[0][1][-1] == 5 if num_steps == 5 else ended[0][1][-1] < 20
    assert (tmp_path / "run.pt").exists()


def test_ranks_go_on_from_one_checkpoint(ranks, tmp_path):
    """If ranks find different checkpoints at one path, as on separate disks, all these ranks raise."""
    for text in ranks(2).run(loops.resumed, str(tmp_path)):
        assert "is another on some of the ranks" in text and "rank 1 has one of epoch 1, batch 0" in text


def test_a_checkpoint_that_one_rank_sees_is_none(ranks, tmp_path):
    """If the other ranks do not see the checkpoint of the first rank, all ranks raise and name them."""
    for text in ranks(2).run(loops.seen_by_one, str(tmp_path)):
        assert "is not one for all ranks" in text and "not seen by rank 1" in text


def test_the_first_rank_says_when_minutes_are_over(ranks, tmp_path):
    """With `save_every_minutes` all ranks save after the same step. The first rank's clock decides."""
    first, second = ranks(2).run(loops.saved_by_the_clock, str(tmp_path / "run.pt"), 3.0)
    assert first == second
    assert first[0] == [(0, 0), (0, 15), (0, 31)]


def test_a_folder_of_checkpoints_has_one_job(ranks, tmp_path):
    """All ranks of a job raise while another run keeps checkpoints in their folder. When it has ended, they go on."""
    ended = []

    def callback(record):
        if record.when == "epoch":
            ended.extend(ranks(2).run(loops.kept, str(tmp_path / "run")))

    add = lambda total, batch: (total + batch, {"loss": total})
    fr.fit(add, torch.tensor(0.0), [1.0] * 4, epochs=1, checkpoint=tmp_path / "run", keep=2, callbacks=[callback])
    (first, said), (second, told) = ended
    assert first is second is None and "is the folder of a run that goes on" in said
    assert "rank 0 could not hold the folder" in told and "is the folder of a run that goes on" in told
    assert ranks(2).run(loops.kept, str(tmp_path / "run")) == [(8.0, None)] * 2
