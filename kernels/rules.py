"""The rules of the built-in row optimizers: written by `python -m funcrec.optim.write`, and not by hand.

A rule's number is its place in the table, and never changes.
"""

from funcrec.kernels.forms import Rule

# fmt: off
RULES: dict[str, Rule] = {
    "sgd": Rule(
        slots=(),
        hyper=("weight_decay",),
    ),
    "momentum": Rule(
        slots=("momentum",),
        hyper=("momentum", "weight_decay", "nesterov"),
        wide=(True,),
    ),
    "lars_sgd": Rule(
        slots=("momentum",),
        hyper=("eta", "momentum", "weight_decay"),
        wide=(True,),
    ),
    "lion": Rule(
        slots=("mean",),
        hyper=("b1", "b2", "weight_decay"),
        wide=(True,),
    ),
    "adagrad": Rule(
        slots=("sum",),
        hyper=("eps", "weight_decay"),
        wide=(True,),
    ),
    "rowwise_adagrad": Rule(
        slots=("sum",),
        hyper=("eps", "weight_decay", "decay", "max_norm"),
        wide=(False,),
    ),
    "rowwise_adagrad_counter": Rule(
        slots=("sum", "counter", "last"),
        hyper=("half_life", "eps", "weight_decay", "decay"),
        wide=(False, False, False),
        is_timed=True,
    ),
    "rowwise_adagrad_cowclip": Rule(
        slots=("sum",),
        hyper=("clip_ratio", "lower_bound", "eps", "weight_decay", "decay"),
        wide=(False,),
        counts_entries=True,
    ),
    "rmsprop": Rule(
        slots=("square", "momentum"),
        hyper=("b2", "eps", "momentum", "weight_decay"),
        wide=(True, True),
        optional=(("momentum", "momentum"),),
    ),
    "ftrl": Rule(
        slots=("z", "sum"),
        hyper=("beta", "l1", "l2"),
        wide=(True, True),
    ),
    "adam": Rule(
        slots=("mean", "square"),
        hyper=("b1", "b2", "eps", "weight_decay"),
        wide=(True, True),
        is_timed=True,
    ),
    "adamw": Rule(
        slots=("mean", "square"),
        hyper=("b1", "b2", "eps", "weight_decay"),
        wide=(True, True),
        is_timed=True,
    ),
    "partial_rowwise_adam": Rule(
        slots=("mean", "square"),
        hyper=("b1", "b2", "eps", "weight_decay"),
        wide=(True, False),
        is_timed=True,
    ),
    "lamb": Rule(
        slots=("mean", "square"),
        hyper=("b1", "b2", "eps", "weight_decay"),
        wide=(True, True),
        is_timed=True,
    ),
    "partial_rowwise_lamb": Rule(
        slots=("mean", "square"),
        hyper=("b1", "b2", "eps", "weight_decay"),
        wide=(True, False),
        is_timed=True,
    ),
}
FORMULAS = 1777904588  # of csrc/formulas.h, which an object must have been built from
