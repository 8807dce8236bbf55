"""Recommendation models as pure functions on torch.

`help(fr.lookup)` explains one name, `help(fr.optim)` the names of a namespace; `fr.__version__` is the version.
"""

# ruff: noqa: I001 (in the order of the data flow)

from funcrec.core import checked as checked
from funcrec.core import CheckError as CheckError
from funcrec.core import DonatedError as DonatedError
from funcrec.core import fold_in as fold_in
from funcrec.core import key as key
from funcrec.core import pytree as pytree
from funcrec.core import split as split
from funcrec.invariance import invariant as invariant
from funcrec.jagged import JaggedTensor as JaggedTensor
from funcrec.jagged import KeyedJaggedTensor as KeyedJaggedTensor
from funcrec.jagged import KeyedTensor as KeyedTensor
from funcrec.jagged import bag_filter as bag_filter
from funcrec.jagged import bag_reduce as bag_reduce
from funcrec.jagged import bag_softmax as bag_softmax
from funcrec.jagged import dedup_bags as dedup_bags
from funcrec.jagged import drop_ids as drop_ids
from funcrec.jagged import jagged_attention as jagged_attention
from funcrec.jagged import pad_to_bucket as pad_to_bucket
from funcrec.jagged import regroup as regroup
from funcrec.mesh import all_gather as all_gather
from funcrec.mesh import all_to_all as all_to_all
from funcrec.mesh import axis_index as axis_index
from funcrec.mesh import axis_size as axis_size
from funcrec.mesh import Codec as Codec
from funcrec.mesh import Mesh as Mesh
from funcrec.mesh import P as P
from funcrec.mesh import pmax as pmax
from funcrec.mesh import pmean as pmean
from funcrec.mesh import pmin as pmin
from funcrec.mesh import ppermute as ppermute
from funcrec.mesh import psum as psum
from funcrec.mesh import psum_invariant as psum_invariant
from funcrec.mesh import psum_scatter as psum_scatter
from funcrec.mesh import pvary as pvary
from funcrec.mesh import ragged_all_to_all as ragged_all_to_all
from funcrec.mesh import shard as shard
from funcrec.mesh import shard_map as shard_map
from funcrec.mesh import unshard as unshard
from funcrec.grad import accumulate_grads as accumulate_grads
from funcrec.grad import conjugate_gradient as conjugate_gradient
from funcrec.grad import example_dots as example_dots
from funcrec.grad import example_norms as example_norms
from funcrec.grad import fisher_product as fisher_product
from funcrec.grad import gauss_newton_product as gauss_newton_product
from funcrec.grad import gradient_noise_scale as gradient_noise_scale
from funcrec.grad import hvp as hvp
from funcrec.grad import lanczos as lanczos
from funcrec.grad import of_rows as of_rows
from funcrec.grad import OfRows as OfRows
from funcrec.grad import per_example_grads as per_example_grads
from funcrec.grad import private_grads as private_grads
from funcrec.grad import remat as remat
from funcrec.grad import Solution as Solution
from funcrec.grad import Spectrum as Spectrum
from funcrec.grad import sum_examples as sum_examples
from funcrec.stores import ColdStore as ColdStore
from funcrec.stores import file_store as file_store
from funcrec.stores import memory_store as memory_store
from funcrec.tables import Batch as Batch
from funcrec.tables import clip_by_global_norm as clip_by_global_norm
from funcrec.tables import constant as constant
from funcrec.tables import FeatureConfig as FeatureConfig
from funcrec.tables import global_norm as global_norm
from funcrec.tables import Hash as Hash
from funcrec.tables import hash_rows as hash_rows
from funcrec.tables import init as init
from funcrec.tables import Initializer as Initializer
from funcrec.tables import lookup as lookup
from funcrec.tables import lookup_each as lookup_each
from funcrec.tables import lookup_sequence as lookup_sequence
from funcrec.tables import lookup_sequence_transpose as lookup_sequence_transpose
from funcrec.tables import lookup_transpose as lookup_transpose
from funcrec.tables import modulo as modulo
from funcrec.tables import multiply_shift as multiply_shift
from funcrec.tables import normal as normal
from funcrec.tables import Params as Params
from funcrec.tables import RowGrads as RowGrads
from funcrec.tables import sequence_ids as sequence_ids
from funcrec.tables import TableConfig as TableConfig
from funcrec.tables import uniform as uniform
from funcrec.tables import validate as validate
from funcrec.grad import value_and_grad as value_and_grad
from funcrec.tables import xavier_normal as xavier_normal
from funcrec.tree import copy as copy
from funcrec.compile import cond as cond
from funcrec.compile import debug_print as debug_print
from funcrec.compile import eval_shape as eval_shape
from funcrec.compile import fori_loop as fori_loop
from funcrec.compile import jit as jit
from funcrec.compile import while_loop as while_loop
from funcrec.compile import Lowered as Lowered
from funcrec.kinds import admit as admit
from funcrec.kinds import dequantize as dequantize
from funcrec.kinds import dynamic_tables as dynamic_tables
from funcrec.kinds import DynamicTables as DynamicTables
from funcrec.kinds import expire as expire
from funcrec.kinds import fake_quantize as fake_quantize
from funcrec.kinds import FakeQuantizedTables as FakeQuantizedTables
from funcrec.kinds import find as find
from funcrec.kinds import grow as grow
from funcrec.kinds import quantize as quantize
from funcrec.kinds import QuantizedTables as QuantizedTables
from funcrec.kinds import renew as renew
from funcrec.kinds import Turnover as Turnover
from funcrec.kinds import Vocabulary as Vocabulary
from funcrec.kinds import vocabulary as vocabulary
from funcrec.kinds import VocabularyConfig as VocabularyConfig
from funcrec.kinds import vocabulary_items as vocabulary_items
from funcrec.kinds import vocabulary_of as vocabulary_of
from funcrec.retrieval import build_index as build_index
from funcrec.retrieval import Index as Index
from funcrec.retrieval import search_index as search_index
from funcrec.retrieval import top_k as top_k
from funcrec.sharding import column_wise as column_wise
from funcrec.sharding import DenseShard as DenseShard
from funcrec.sharding import gather_tables as gather_tables
from funcrec.sharding import grid as grid
from funcrec.sharding import Placement as Placement
from funcrec.sharding import Plan as Plan
from funcrec.sharding import replicated as replicated
from funcrec.sharding import row_wise as row_wise
from funcrec.sharding import shard_tables as shard_tables
from funcrec.sharding import ShardedTables as ShardedTables
from funcrec.sharding import table_column_wise as table_column_wise
from funcrec.sharding import table_row_wise as table_row_wise
from funcrec.sharding import table_wise as table_wise
from funcrec.sharding import Tower as Tower
from funcrec.sharding import tower_placements as tower_placements
from funcrec.sharding import towers as towers
from funcrec.history import apply_delta as apply_delta
from funcrec.history import Delta as Delta
from funcrec.history import delta as delta
from funcrec.dry import dry_run as dry_run
from funcrec.dry import DryRun as DryRun
from funcrec.planner import Hardware as Hardware
from funcrec.planner import plan as plan
from funcrec.planner import TableConstraint as TableConstraint
from funcrec.cached import CacheConfig as CacheConfig
from funcrec.cached import cached_step as cached_step
from funcrec.cached import cached_tables as cached_tables
from funcrec.cached import table_store as table_store
from funcrec.cached import TableStore as TableStore
from funcrec.train import admission as admission
from funcrec.train import gather_state as gather_state
from funcrec.history import Logged as Logged
from funcrec.history import logged as logged
from funcrec.train import member as member
from funcrec.train import reshard as reshard
from funcrec.train import retry_overflow as retry_overflow
from funcrec.history import rewind as rewind
from funcrec.train import scan as scan
from funcrec.train import sweep as sweep
from funcrec.train import sweep_table as sweep_table
from funcrec.train import SweepTable as SweepTable
from funcrec.train import sync_replicas as sync_replicas
from funcrec.train import train_step as train_step
from funcrec.train import TrainState as TrainState
from funcrec.train import TrainStep as TrainStep
from funcrec.train import flush as flush
from funcrec.train import private_step as private_step
from funcrec.train import PrivateState as PrivateState
from funcrec.loop import evaluate as evaluate
from funcrec.loop import evaluate_retrieval as evaluate_retrieval
from funcrec.loop import fit as fit
from funcrec.loop import Fitted as Fitted
from funcrec.loop import pipeline as pipeline
from funcrec.loop import predict as predict
from funcrec.loop import stale_pipeline as stale_pipeline
from funcrec.checkpoint import latest as latest
from funcrec.checkpoint import load as load
from funcrec.checkpoint import load_safetensors as load_safetensors
from funcrec.checkpoint import save as save
from funcrec.checkpoint import save_safetensors as save_safetensors
from funcrec.checkpoint import Saving as Saving
from funcrec.serve import export as export
from funcrec.serve import load_package as load_package
from funcrec.serve import Package as Package
from funcrec.serve import publish as publish
from funcrec.serve import save_weights as save_weights
from funcrec.serve import update_server as update_server
from funcrec.serve import write_delta as write_delta

from funcrec import data as data
from funcrec import interop as interop
from funcrec import kernels as kernels
from funcrec import loop as loop
from funcrec import losses as losses
from funcrec import metrics as metrics
from funcrec import models as models
from funcrec import nn as nn
from funcrec import optim as optim
from funcrec import random as random
from funcrec import tree as tree

import typing as _typing

import funcrec.core as _core

if _typing.TYPE_CHECKING:  # imported when it is first used
    from funcrec import examples as examples
    from funcrec import testing as testing

_core.publish(
    globals(),
    later={
        "testing": _core.module_later("funcrec.testing", "Strategies and checkers of laws, for your own operations."),
        "examples": _core.module_later("funcrec.examples", "Programs that use funcrec as a user would."),
        "__version__": _core.Later(_core.version),
    },
    is_listed=True,
)
