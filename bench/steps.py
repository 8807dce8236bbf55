"""Measures whole training steps: lookup, dense part, backward, row-wise Adagrad on the tables, and SGD (DLRM) or
Adagrad (DCNv2) on the dense part.

funcrec runs `train_step` under jit with donation. TorchRec runs a fused EmbeddingBagCollection, with the dense part
eager and compiled. The law: the losses of the first two steps agree. The second loss includes the first update.
"""

import contextlib
import itertools
from collections.abc import Iterator

import cases
import roofline
import torch
import torch.nn.functional as F
from cases import NUM_BATCHES, StepCase
from contest import OURS, Closeness, Contender, Setting, compete
from dense_models import DCNDense, DLRMDense
from funcrec.kernels import ops
from peers import EPS, LR, feature_ids, installed, quiet, torchrec_ids, torchrec_tables

import funcrec as fr

NUM_TABLES, NUM_DENSE = 26, 13
DENSE_LR = 0.01
ADAGRAD_LR = 1e-4  # its first update is lr times signs: at 0.01 DCNv2's next loss is 327, which is 0.03 from float64's
DENSE_PARTS = {"dlrm": DLRMDense, "dcnv2": DCNDense}
DENSE_OPTIMIZERS = {"dlrm": torch.optim.SGD, "dcnv2": torch.optim.Adagrad, "deepfm": torch.optim.SGD}
DENSE_LRS = {"dlrm": DENSE_LR, "dcnv2": ADAGRAD_LR, "deepfm": DENSE_LR}


def make_model(case: StepCase, tiny: bool) -> fr.models.Model:
    if case.model == "dcnv2":
        return fr.models.mlperf_dlrm_dcnv2(case.num_rows, embedding_dim=case.dim)
    count = 3 if tiny else NUM_TABLES
    tables = [fr.TableConfig(f"t{i}", case.num_rows, case.dim) for i in range(count)]
    features = [fr.FeatureConfig(f"f{i}", table=f"t{i}", max_length=case.ids_per_bag) for i in range(count)]
    return fr.models.dlrm(
        tables, features, num_dense=NUM_DENSE, bottom=(512, 256, case.dim), sizes=(512, 256), keep="dense"
    )


def make_batches(case: StepCase, model: fr.models.Model, device: str) -> list[fr.Batch]:
    rows = {t.name: t.num_embeddings for t in model.tables}
    data = fr.data.random_rows(
        fr.key(0), {f.key: rows[f.table] for f in model.features},
        ids_per_bag={f.key: f.max_length for f in model.features}, alpha=case.alpha, num_dense=NUM_DENSE,
    )  # fmt: skip
    batches = []
    for k in range(NUM_BATCHES):
        batch = fr.data.take(data, torch.arange(k * case.batch, (k + 1) * case.batch))
        batches.append(fr.Batch(cases.to_device(batch.ids, device), batch.label.to(device), batch.dense.to(device)))
    return batches


def precision(case: StepCase, device: str):
    """Return a context for the precision of matrix products in 16 bits. Tables and state stay f32."""
    if case.precision in ("float32", "tf32"):
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, getattr(torch, case.precision))


def funcrec_step(
    case: StepCase,
    model: fr.models.Model,
    params: fr.Params,
    batches: list,
    device: str,
    reference: bool = False,
    compiled: bool = True,
    donate: tuple[str, ...] = ("state",),
    invariant: bool = False,
) -> Contender:
    """Return funcrec's step. reference: whether it runs in plain torch, not compiled. invariant: as in train_step."""
    plain = fr.models.loss(model)

    def loss_fn(params, batch, *, key):
        with precision(case, device):
            return plain(params, batch, key=key)

    step = fr.train_step(
        loss_fn, sparse=fr.optim.rowwise_adagrad(lr=LR, eps=EPS), has_aux=True,
        dense=fr.optim.dense(DENSE_OPTIMIZERS[case.model], lr=DENSE_LRS[case.model]), invariant=invariant,
    )  # fmt: skip
    fast = fr.jit(step, donate=donate) if compiled and not reference else step
    held, turn = {"state": step.init(params)}, itertools.cycle(batches)

    def call():
        with ops.using("reference") if reference else contextlib.nullcontext():
            held["state"], metrics = fast(held["state"], next(turn))
        return metrics["loss"]

    return Contender(lambda: two_losses(call), call)


def torchrec_step(case: StepCase, model, params: fr.Params, batches: list, device: str, compiled: bool) -> Contender:
    bags = torchrec_tables(model.features, params.tables, device)
    dense = DENSE_PARTS[case.model](params.dense, len(model.features))
    run_dense = torch.compile(dense) if compiled else dense
    optimizer = DENSE_OPTIMIZERS[case.model](dense.parameters(), lr=DENSE_LRS[case.model])
    theirs = [(torchrec_ids(b.ids), b.dense, b.label) for b in batches]
    turn = itertools.cycle(theirs)

    def call():
        ids, inputs, label = next(turn)
        with precision(case, device):
            logits = run_dense(inputs, bags(ids).values())
        loss = F.binary_cross_entropy_with_logits(logits.float(), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with quiet():
        return Contender(lambda: two_losses(call), call)


def torch_step(case: StepCase, model, params: fr.Params, batches: list, device: str, compiled: bool) -> Contender:
    """Return a step of plain torch: F.embedding_bag with sparse gradients, and row-wise Adagrad written in torch."""
    own = {n: t.clone().requires_grad_() for n, t in params.tables.items()}
    sums = {n: t.new_zeros(t.shape[0]) for n, t in params.tables.items()}
    dense = DENSE_PARTS[case.model](params.dense, len(model.features))
    run_dense = torch.compile(dense) if compiled else dense
    optimizer = DENSE_OPTIMIZERS[case.model](dense.parameters(), lr=DENSE_LRS[case.model])
    turn = itertools.cycle([(feature_ids(b.ids, [f.key for f in model.features]), b.dense, b.label) for b in batches])

    def call():
        ids, inputs, label = next(turn)
        bags = {"include_last_offset": True, "sparse": True, "mode": "sum"}
        with precision(case, device):
            pooled = [
                F.embedding_bag(ids[f.key].values, own[f.table], ids[f.key].offsets, **bags) for f in model.features
            ]
            logits = run_dense(inputs, torch.cat(pooled, 1))
        loss = F.binary_cross_entropy_with_logits(logits.float(), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for n, table in own.items():
                grad = table.grad.coalesce()
                rows, values = grad.indices()[0], grad.values()
                sums[n].index_add_(0, rows, values.square().mean(1))
                table.index_add_(0, rows, -LR * values / (sums[n][rows, None].sqrt() + EPS))
                table.grad = None
        return loss.detach()

    return Contender(lambda: two_losses(call), call)


def two_losses(call) -> dict:
    return {"loss of step 0": call(), "loss of step 1": call()}


def closeness(case: StepCase) -> Closeness:
    if case.precision == "float32":
        return Closeness(1e-4, 1e-5)
    return Closeness(2 * {"tf32": 2.0**-10, "bfloat16": torch.finfo(torch.bfloat16).eps}[case.precision], 0.0)


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Return a context in which f32 products on a GPU may run in TF32, or may not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def run(case: StepCase, setting: Setting) -> dict:
    with products_in(case.precision):
        return measured(case, setting)


def measured(case: StepCase, setting: Setting) -> dict:
    device = setting.device
    case = cases.tiny(case)._replace(dim=16) if setting.tiny else case
    model = make_model(case, setting.tiny)
    params = move(model.init(fr.key(0)), lambda x: x.to(device))
    batches = make_batches(case, model, device)
    work = work_of(case, model, params, batches)
    builders = {
        "torchrec": lambda: torchrec_step(case, model, params, batches, device, compiled=False),
        "torchrec, dense compiled": lambda: torchrec_step(case, model, params, batches, device, compiled=True),
    }
    if torch.device(device).type == "cuda":
        ours = lambda **how: lambda: funcrec_step(case, model, params, batches, device, **how)
        builders |= {
            "torch": lambda: torch_step(case, model, params, batches, device, compiled=False),
            "torch, dense compiled": lambda: torch_step(case, model, params, batches, device, compiled=True),
            "funcrec, eager": ours(compiled=False), "funcrec, not donated": ours(donate=()),
        }  # fmt: skip
    elif not installed("torchrec"):  # then the reference judges the law
        builders["reference"] = lambda: funcrec_step(case, model, params, batches, device, reference=True)
    builders[OURS] = lambda: funcrec_step(case, model, params, batches, device)  # last: it uses up the tables
    figures = compete(builders, setting, closeness(case))
    if "ms" in figures:
        per_s = {name: case.batch / t["median"] * 1e3 for name, t in figures["ms"].items()}
        figures["samples_per_s"] = {name: round(x) for name, x in per_s.items()}
        figures["samples_per_s_per_thread"] = {name: round(x / setting.threads) for name, x in per_s.items()}
        kind = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
        figures = roofline.added(figures, work, setting, case.dim, torch.float32, kind)
    return {"shape": case._asdict(), **figures}


def work_of(case: StepCase, model: fr.models.Model, params: fr.Params, batches: list) -> roofline.Work:
    slots = fr.optim.rowwise_adagrad(lr=LR, eps=EPS).init({n: t[:1] for n, t in params.tables.items()})
    how = roofline.Dense(int(DENSE_OPTIMIZERS[case.model] is torch.optim.Adagrad), case.model == "dlrm")
    return roofline.step_work(model, params, batches, slots, how)


def move(params: fr.Params, fn) -> fr.Params:
    """Return the parameters with `fn` applied to each tensor."""
    each = lambda tree: torch.utils._pytree.tree_map(fn, tree)
    return fr.Params(each(params.tables), each(params.dense))


CASES, QUICK, GPU = cases.STEPS, cases.QUICK_STEPS, cases.GPU_STEPS
