"""funcrec: recommendation models as pure functions on torch."""

# ruff: noqa: I001 (the namespaces come last: they import what stands above)

from funcrec._checkpoint import load as load
from funcrec._checkpoint import save as save
from funcrec._checked import checked as checked
from funcrec._checks import validate as validate
from funcrec._codec import Codec as Codec
from funcrec._collectives import all_gather as all_gather
from funcrec._collectives import all_to_all as all_to_all
from funcrec._collectives import axis_index as axis_index
from funcrec._collectives import axis_size as axis_size
from funcrec._collectives import pmax as pmax
from funcrec._collectives import pmean as pmean
from funcrec._collectives import pmin as pmin
from funcrec._collectives import ppermute as ppermute
from funcrec._collectives import psum as psum
from funcrec._collectives import psum_invariant as psum_invariant
from funcrec._collectives import psum_scatter as psum_scatter
from funcrec._collectives import pvary as pvary
from funcrec._configs import FeatureConfig as FeatureConfig
from funcrec._configs import Hash as Hash
from funcrec._configs import TableConfig as TableConfig
from funcrec._configs import modulo as modulo
from funcrec._configs import multiply_shift as multiply_shift
from funcrec._errors import CheckError as CheckError
from funcrec._errors import DonatedError as DonatedError
from funcrec._grad import value_and_grad as value_and_grad
from funcrec._hashing import hash_rows as hash_rows
from funcrec._init import Initializer as Initializer
from funcrec._init import constant as constant
from funcrec._init import init as init
from funcrec._init import normal as normal
from funcrec._init import uniform as uniform
from funcrec._init import xavier_normal as xavier_normal
from funcrec._jagged import JaggedTensor as JaggedTensor
from funcrec._jit import jit as jit
from funcrec._keyed_jagged import KeyedJaggedTensor as KeyedJaggedTensor
from funcrec._keyed_jagged import pad_to_bucket as pad_to_bucket
from funcrec._keyed_tensor import KeyedTensor as KeyedTensor
from funcrec._keyed_tensor import regroup as regroup
from funcrec._lookup import lookup as lookup
from funcrec._lookup import lookup_sequence as lookup_sequence
from funcrec._lookup import lookup_sequence_transpose as lookup_sequence_transpose
from funcrec._lookup import lookup_transpose as lookup_transpose
from funcrec._memory import copy as copy
from funcrec._mesh import Mesh as Mesh
from funcrec._mesh import P as P
from funcrec._random import fold_in as fold_in
from funcrec._random import key as key
from funcrec._random import split as split
from funcrec._placement import Placement as Placement
from funcrec._placement import Plan as Plan
from funcrec._placement import column_wise as column_wise
from funcrec._placement import grid as grid
from funcrec._placement import replicated as replicated
from funcrec._placement import row_wise as row_wise
from funcrec._placement import table_column_wise as table_column_wise
from funcrec._placement import table_row_wise as table_row_wise
from funcrec._placement import table_wise as table_wise
from funcrec._ragged import ragged_all_to_all as ragged_all_to_all
from funcrec._replicas import sync_replicas as sync_replicas
from funcrec._reshard import gather_state as gather_state
from funcrec._reshard import reshard as reshard
from funcrec._retry import retry_overflow as retry_overflow
from funcrec._rowgrads import RowGrads as RowGrads
from funcrec._rowgrads import clip_by_global_norm as clip_by_global_norm
from funcrec._rowgrads import global_norm as global_norm
from funcrec._scan import scan as scan
from funcrec._shard_map import shard as shard
from funcrec._shard_map import shard_map as shard_map
from funcrec._shard_map import unshard as unshard
from funcrec._sharded import ShardedTables as ShardedTables
from funcrec._sharded import gather_tables as gather_tables
from funcrec._sharded import shard_tables as shard_tables
from funcrec._sharded_dense import DenseShard as DenseShard
from funcrec._state import Batch as Batch
from funcrec._state import Params as Params
from funcrec._state import TrainState as TrainState
from funcrec._step import TrainStep as TrainStep
from funcrec._step import train_step as train_step
from funcrec._tree import pytree as pytree

from funcrec import data as data
from funcrec import kernels as kernels
from funcrec import metrics as metrics
from funcrec import models as models
from funcrec import nn as nn
from funcrec import optim as optim

import funcrec._tree as _tree

_tree.publish(globals())
