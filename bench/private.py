"""Trains a factorisation machine on MovieLens-1M with DP-SGD at several ε, beside the same training without privacy.

    python bench/private.py        (pip install opacus: its accountant turns ε into noise)

Each step draws every example with one probability (Poisson sampling), clips each example's gradient, and adds noise to
every row of every table and to every dense number: the guarantee of Abadi et al. (2016), for examples, with δ = 1e-6.
"""

import functools
import sys
import time

import torch
from measure import explain, record
from sklearn.metrics import roc_auc_score

import funcrec as fr

STEPS, BATCH, DELTA, MAX_NORM, RATE = 600, 8192, 1e-6, 1.0, 32.0


def noise_for(epsilon: float, examples: int) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    how = {"sample_rate": BATCH / examples, "steps": STEPS, "accountant": "rdp"}
    return get_noise_multiplier(target_epsilon=epsilon, target_delta=DELTA, **how)


def train(split, noise: float | None, steps: int = STEPS) -> dict:
    """Return test AUC and seconds of the processor. noise: the multiplier; None for training without clipping."""
    model = fr.models.ml1m("fm")
    how = {"max_norm": MAX_NORM, "noise_multiplier": noise, "batch_size": BATCH, "chunk_size": 2048}
    grad = None if noise is None else functools.partial(fr.private_grads, **how)
    rate = RATE if noise is not None else 1.0
    sgd = {"sparse": fr.optim.sgd(lr=rate), "dense": fr.optim.dense(torch.optim.SGD, lr=rate)}
    step = fr.train_step(model, **sgd, grad=grad)
    state, began = step.init(model.init(fr.key(0)), fr.key(1)), time.process_time()
    for i in range(steps):
        drawn = torch.rand(len(split.train), generator=torch.Generator().manual_seed(i)) < BATCH / len(split.train)
        state, _ = step(state, split.data.take(split.train[drawn]))
    scores, labels = [], []
    for rows in split.test.split(20_000):
        batch = split.data.take(rows)
        scores.append(model.apply(state.params, batch).flatten())
        labels.append(batch.label)
    auc = roc_auc_score(torch.cat(labels), torch.cat(scores))
    return {"noise_multiplier": noise, "test_auc": round(auc, 4), "processor_s": round(time.process_time() - began)}


def main(epsilons=(1.0, 3.0, 8.0)) -> None:
    torch.set_num_threads(1)
    split = fr.data.ctr_dataset(fr.data.movielens_1m())
    runs = {"no clipping": train(split, None), "clipped, no noise": train(split, 0.0)}
    for epsilon in epsilons:
        runs[f"epsilon {epsilon:g}"] = train(split, noise_for(epsilon, len(split.train)))
        print(runs, file=sys.stderr)
    how = {"model": "fm", "steps": STEPS, "expected_batch": BATCH, "delta": DELTA, "max_norm": MAX_NORM, "lr": RATE}
    record("private", {**how, "runs": runs})


if __name__ == "__main__":
    explain(__doc__)
    main()
