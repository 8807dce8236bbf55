"""Optimizers as pure functions: rules for the rows of tables, and the classes of torch.optim for dense parameters.

tables', slots' = sparse.update(row_grads, slots, tables, step)
dense', state' = dense.update(grads, state, dense, step)

Each optimizer is a pair of functions, `init` and `update`. Combinators take such pairs and return such pairs.
"""

import funcrec.core as _core
from funcrec.optim._accumulate import accumulate as accumulate
from funcrec.optim._adagrad import adagrad as adagrad
from funcrec.optim._adagrad import ftrl as ftrl
from funcrec.optim._adagrad import rmsprop as rmsprop
from funcrec.optim._adagrad import rowwise_adagrad as rowwise_adagrad
from funcrec.optim._adagrad import rowwise_adagrad_counter as rowwise_adagrad_counter
from funcrec.optim._adagrad import rowwise_adagrad_cowclip as rowwise_adagrad_cowclip
from funcrec.optim._adam import adam as adam
from funcrec.optim._adam import adamw as adamw
from funcrec.optim._adam import lamb as lamb
from funcrec.optim._adam import partial_rowwise_adam as partial_rowwise_adam
from funcrec.optim._adam import partial_rowwise_lamb as partial_rowwise_lamb
from funcrec.optim._by_path import by_path as by_path
from funcrec.optim._combine import by_table as by_table
from funcrec.optim._combine import clip as clip
from funcrec.optim._combine import freeze as freeze
from funcrec.optim._combine import stochastic_rounding as stochastic_rounding
from funcrec.optim._dense import DenseOptimizer as DenseOptimizer
from funcrec.optim._dense import dense as dense
from funcrec.optim._ema import averaged as averaged
from funcrec.optim._ema import ema as ema
from funcrec.optim._row import RowOptimizer as RowOptimizer
from funcrec.optim._row import row_optimizer as row_optimizer
from funcrec.optim._schedule import Stage as Stage
from funcrec.optim._schedule import schedule as schedule
from funcrec.optim._sgd import lars_sgd as lars_sgd
from funcrec.optim._sgd import lion as lion
from funcrec.optim._sgd import momentum as momentum
from funcrec.optim._sgd import sgd as sgd

_core.publish(globals())
