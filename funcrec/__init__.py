"""funcrec: recommendation models as pure functions on torch."""

# ruff: noqa: I001 (the namespaces come last: they import what stands above)

from funcrec._checkpoint import load as load
from funcrec._checkpoint import save as save
from funcrec._checked import checked as checked
from funcrec._checks import validate as validate
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
from funcrec._random import fold_in as fold_in
from funcrec._random import key as key
from funcrec._random import split as split
from funcrec._rowgrads import RowGrads as RowGrads
from funcrec._rowgrads import clip_by_global_norm as clip_by_global_norm
from funcrec._rowgrads import global_norm as global_norm
from funcrec._scan import scan as scan
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
