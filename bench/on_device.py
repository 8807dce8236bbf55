"""Measures what a GPU's user calls beside lookups and steps: attention of bags, sampled softmax, quantised lookups,
pipelines, two ranks on one GPU (`shared_gpu`).

The peers are plain torch: padded bags and scaled_dot_product_attention; a product with all negatives and cross_entropy;
F.embedding_bag on f16 tables; a loop that copies each batch before its step. The law: results and gradients agree.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import attention
import cases
import shared_gpu
import steps
import torch
import torch.nn.functional as F
from contest import OURS, Closeness, Contender, Setting, compete
from torch import Tensor

import funcrec as fr


class Attention(NamedTuple):
    lengths: str
    batch: int
    heads: int
    dim: int


class SampledSoftmax(NamedTuple):
    batch: int
    num_negatives: int
    dim: int


class Quantized(NamedTuple):
    bits: str
    batch: int
    ids_per_bag: int
    num_tables: int = 26
    num_rows: int = 100_000
    dim: int = 64


class Piped(NamedTuple):
    step: str  # a name of cases.STEPS


CASES = {
    "attention-ml1m": Attention("ml-1m", 128, 2, 32),
    "attention-tail": Attention("long tail", 128, 4, 128),
    "sampled-softmax": SampledSoftmax(8192, 4096, 64),
    "quantized-int8": Quantized("int8", 4096, 20),
    "quantized-int4": Quantized("int4", 4096, 20),
    "pipeline": Piped("dlrm-d64-b8192-l5"),
    "two-ranks": shared_gpu.Shared("row_wise", False),
    "two-ranks-jit": shared_gpu.Shared("row_wise", True),
}
QUICK = ("attention-ml1m", "sampled-softmax", "quantized-int8", "pipeline", "two-ranks")
GPU = (*QUICK, "two-ranks-jit")


def with_gradients(fn: Callable[..., Tensor], inputs: list[Tensor]) -> Contender:
    """Return a contender that computes fn(*inputs) and the gradients of the sum of squares of its result."""
    own = [x.clone().requires_grad_() for x in inputs]

    def call() -> dict[str, Tensor]:
        out = fn(*own)
        grads = torch.autograd.grad(out.square().sum(), own)
        return {"result": out.detach(), **{f"gradient {i}": g for i, g in enumerate(grads)}}

    return Contender(call, call)


def attention_of(case: Attention, device: str) -> dict[str, Callable[[], Contender]]:
    lengths = attention.lengths_of(case.lengths, case.batch).to(device)
    total, longest = int(lengths.sum()), int(lengths.max())
    bags = fr.JaggedTensor.from_lengths(torch.zeros(total, device=device), lengths)
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(total, case.heads, case.dim, generator=draw).to(device) for _ in range(3)]

    def ours(q, k, v):
        return fr.jagged_attention(fr.JaggedTensor(q, bags.offsets), fr.JaggedTensor(k, bags.offsets), v).values

    def padded(q, k, v):
        blocks = [fr.JaggedTensor(x, bags.offsets).to_padded(longest).movedim(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*blocks, is_causal=True).movedim(1, 2)
        return out[torch.arange(longest, device=device) < lengths[:, None]]

    return {"torch, padded": lambda: with_gradients(padded, inputs), OURS: lambda: with_gradients(ours, inputs)}


def sampled_softmax_of(case: SampledSoftmax, device: str) -> dict[str, Callable[[], Contender]]:
    draw = torch.Generator().manual_seed(0)
    sizes = (case.batch, case.batch, case.num_negatives)
    inputs = [torch.randn(n, case.dim, generator=draw).mul(0.3).to(device) for n in sizes]

    def plain(query, candidate, negatives):
        logits = torch.cat([(query * candidate).sum(1, keepdim=True), query @ negatives.T], 1)
        return F.cross_entropy(logits, torch.zeros(case.batch, dtype=torch.int64, device=device))

    builders = {"torch": plain, "torch.compile": torch.compile(plain), OURS: fr.losses.sampled_softmax}
    return {name: lambda f=f: with_gradients(f, inputs) for name, f in builders.items()}


def quantized_of(case: Quantized, device: str) -> dict[str, Callable[[], Contender]]:
    shape = cases.TableCase(case.num_tables, case.num_rows, case.dim, case.batch, case.ids_per_bag)
    whole, features = cases.make_tables(shape, "cpu"), shape.features()
    codes = fr.quantize(whole, case.bits).to(device)
    batches = cases.table_batches(shape, device)
    f16 = {n: t.half() for n, t in fr.dequantize(codes).items()}

    def contender(read: Callable[[fr.KeyedJaggedTensor], Tensor]) -> Contender:
        turn = itertools.cycle(batches)
        return Contender(lambda: {"bags": read(batches[0])}, lambda: read(next(turn)))

    def bags_of(ids: fr.KeyedJaggedTensor) -> Tensor:
        each = ((n, ids[n]) for n in shape.names)
        sums = [F.embedding_bag(x.values, f16[n], x.offsets, mode="sum", include_last_offset=True) for n, x in each]
        return torch.cat(sums, 1)

    fast = fr.jit(lambda tables, ids: fr.lookup(tables, ids, features).values)
    return {
        "torch, f16 tables": lambda: contender(bags_of),
        "funcrec, eager": lambda: contender(lambda ids: fr.lookup(codes, ids, features).values),
        OURS: lambda: contender(lambda ids: fast(codes, ids)),
    }


def piped_of(case: Piped, setting: Setting) -> dict[str, Callable[[], Contender]]:
    shape, device = cases.STEPS[case.step], setting.device
    shape = cases.tiny(shape)._replace(dim=16) if setting.tiny else shape
    model = steps.make_model(shape, setting.tiny)
    params = steps.move(model.init(fr.key(0)), lambda x: x.to(device))
    batches = steps.make_batches(shape, model, "cpu")

    def stepped() -> tuple[Callable, object]:
        step = fr.train_step(
            fr.models.loss(model), sparse=fr.optim.rowwise_adagrad(lr=steps.LR, eps=steps.EPS), has_aux=True,
            dense=fr.optim.dense(torch.optim.SGD, lr=steps.DENSE_LR),
        )  # fmt: skip
        return fr.jit(step, donate=("state",)), step.init(fr.copy(params))

    def loss_of(run) -> Contender:
        call = lambda: next(run)[1]["loss"]
        return Contender(lambda: steps.two_losses(call), call)

    def plain():
        step, state = stepped()
        for batch in itertools.cycle(batches):
            state, metrics = step(state, batch.to(device))
            yield state, metrics

    def piped():
        step, state = stepped()
        yield from fr.pipeline(step, device=device).run(state, itertools.cycle(batches))

    return {"plain loop": lambda: loss_of(plain()), OURS: lambda: loss_of(piped())}


def run(case: NamedTuple, setting: Setting) -> dict:
    if isinstance(case, shared_gpu.Shared):
        return shared_gpu.run(case, setting)
    if setting.tiny:
        case = cases.tiny(case)
    if isinstance(case, Piped):
        builders = piped_of(case, setting)
    else:
        make = {Attention: attention_of, SampledSoftmax: sampled_softmax_of, Quantized: quantized_of}[type(case)]
        builders = make(case, setting.device)
    close = Closeness(2e-2, 2e-2) if isinstance(case, Quantized) else Closeness(1e-3, 1e-3)
    return {"shape": case._asdict(), **compete(builders, setting, close)}
