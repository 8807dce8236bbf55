"""fr.losses.sampled_softmax and gbce: a candidate among drawn negatives."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, vmap

import funcrec as fr
from funcrec import losses
from funcrec.testing import check_grads

N, K, D, R = 5, 4, 3, 9


def numbers(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


Q, C, SHARED, OWN = numbers(1, N, D), numbers(2, N, D), numbers(3, K, D), numbers(4, N, K, D)
CHANCE, CHANCES = -numbers(5, N).abs(), -numbers(6, N, K).abs()
IDS, DRAWN = torch.tensor([1, 2, 3, 1, 0]), torch.tensor([1, 3, 7, 8])
gbce = lambda *args, **how: losses.gbce(*args, num_items=R, **how)
LOSSES = {"sampled_softmax": losses.sampled_softmax, "gbce": gbce}
EACH = pytest.mark.parametrize("name", LOSSES)


def logits(q, c, n):
    others = q @ n.T if n.dim() == 2 else torch.einsum("nd,nkd->nk", q, n)
    return torch.cat([(q * c).sum(1, keepdim=True), others], 1)


@pytest.mark.parametrize("negatives", [SHARED, OWN], ids=["shared", "own"])
def test_they_are_torchs(negatives):
    """Both losses equal those of torch on the logits [own, negatives], with the source's power on the own score."""
    z, zero = logits(Q, C, negatives), torch.zeros(N, dtype=torch.int64)
    torch.testing.assert_close(losses.sampled_softmax(Q, C, negatives, temperature=0.5), F.cross_entropy(2 * z, zero))
    is_own = F.one_hot(zero, K + 1).double()
    plain = F.binary_cross_entropy_with_logits(z, is_own)
    torch.testing.assert_close(gbce(Q, C, negatives, calibration=0.0), plain)
    share, t = K / (R - 1), 0.75
    beta = share * (t * (1 - 1 / share) + 1 / share)  # eq. 22 of the source
    p = torch.cat([z[:, :1].sigmoid() ** beta, z[:, 1:].sigmoid()], 1)
    torch.testing.assert_close(gbce(Q, C, negatives, calibration=t), F.binary_cross_entropy(p, is_own))


def test_with_all_items_it_is_the_full_softmax():
    """If the negatives are all items except the own one, the loss is full_softmax. A correction by equal chances
    changes nothing."""
    items = numbers(7, R, D)
    given = {"candidate_ids": IDS, "negative_ids": torch.arange(R)}
    want = losses.full_softmax(Q, items, IDS)
    torch.testing.assert_close(losses.sampled_softmax(Q, items[IDS], items, **given), want)
    equal = {"log_q": torch.full((N,), -2.0), "negative_log_q": torch.full((R,), -2.0)}
    torch.testing.assert_close(losses.sampled_softmax(Q, items[IDS], items, **given, **equal), want)


def test_the_correction_and_the_accidental_hits():
    """log_q is subtracted from the scores, and a negative with the candidate's id leaves the sum."""
    got = losses.sampled_softmax(Q, C, OWN, log_q=CHANCE, negative_log_q=CHANCES, reduction="none")
    z = logits(Q, C, OWN) - torch.cat([CHANCE[:, None], CHANCES], 1)
    torch.testing.assert_close(got, -z.log_softmax(1)[:, 0])
    hits = IDS[:, None] == DRAWN
    z = torch.cat([logits(Q, C, SHARED)[:, :1], logits(Q, C, SHARED)[:, 1:].masked_fill(hits, -torch.inf)], 1)
    with_ids = {"candidate_ids": IDS, "negative_ids": DRAWN, "reduction": "none"}
    torch.testing.assert_close(losses.sampled_softmax(Q, C, SHARED, **with_ids), -z.log_softmax(1)[:, 0])
    own = F.logsigmoid(z[:, 0]) + F.logsigmoid(-z[:, 1:]).sum(1)
    torch.testing.assert_close(gbce(Q, C, SHARED, calibration=0.0, **with_ids), -own / (K + 1))
    of_hits = lambda q: gbce(q, C, SHARED, **with_ids).sum()
    assert grad(of_hits)(Q).isfinite().all()


@EACH
def test_transforms(name):
    """First and second derivatives agree with finite differences; vmap is a loop; jit is eager; a shared draw equals
    the same draw for each."""
    loss = LOSSES[name]
    check_grads(lambda q, c, n: loss(q, c, n), (Q, C, SHARED), order=2)
    check_grads(lambda q, n: loss(q, C, n), (Q, OWN), order=2)
    torch.testing.assert_close(loss(Q, C, SHARED), loss(Q, C, SHARED.expand(N, K, D)))
    many = torch.stack([Q, -Q])
    torch.testing.assert_close(vmap(lambda q: loss(q, C, OWN))(many), torch.stack([loss(q, C, OWN) for q in many]))
    of = lambda q: hessian(lambda q: loss(q, C, SHARED))(q)
    torch.testing.assert_close(vmap(of)(many)[1], of(-Q))
    torch.testing.assert_close(fr.jit(loss)(Q, C, OWN), loss(Q, C, OWN))


@EACH
def test_weights_padding_and_dtypes(name):
    """A query of weight 0 is not read, whatever its vectors hold. 16-bit floats are computed in f32."""
    loss, w = LOSSES[name], torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0], dtype=torch.float64)
    hole = (w == 0)[:, None]
    garbage = lambda x: torch.where(hole if x.dim() == 2 else hole[..., None], torch.nan, x)
    kept = lambda q: (loss(q, C, OWN, reduction="none") * w).sum() / w.sum()
    torch.testing.assert_close(loss(garbage(Q), garbage(C), garbage(OWN), w), kept(Q))
    torch.testing.assert_close(grad(lambda q: loss(q, garbage(C), garbage(OWN), w))(garbage(Q)), grad(kept)(Q))
    assert loss(Q[:0], C[:0], OWN[:0], w[:0]) == 0
    low = [x.bfloat16() for x in (Q, C, OWN)]
    assert loss(*low).equal(loss(*(x.float() for x in low)).bfloat16())


@pytest.mark.parametrize("call, part", [
    (lambda: losses.sampled_softmax(Q, C, numbers(1, K, 2)), "`negatives` do not fit the queries"),
    (lambda: losses.sampled_softmax(Q, C, OWN[1:]), "`negatives` do not fit the queries"),
    (lambda: losses.gbce(Q, C, Q[0], num_items=3), "`negatives` do not fit the queries"),
    (lambda: losses.sampled_softmax(Q, C, SHARED, candidate_ids=IDS, negative_ids=IDS), "`negative_ids` do not match"),
    (lambda: losses.sampled_softmax(Q, C, SHARED, log_q=-CHANCE, negative_log_q=-SHARED[:, 0].abs()), "log_q[0]"),
    (lambda: losses.sampled_softmax(Q, C, SHARED, log_q=CHANCE, negative_log_q=SHARED[:, 0] * 0 + 1),
        "negative_log_q[0]"),
    (lambda: losses.sampled_softmax(Q, C, SHARED, log_q=CHANCE), "negative_log_q"),
    (lambda: losses.sampled_softmax(Q, C, SHARED, candidate_ids=IDS), "negative_ids"),
    (lambda: losses.gbce(Q, C, SHARED, num_items=3, calibration=2.0), "`calibration`"),
])  # fmt: skip
def test_bad_input(call, part):
    """Wrong arguments raise, and the error says what came and what is needed."""
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert part in str(raised.value) and all(f"\n  {word}" in str(raised.value) for word in ("got ", "need"))
