"""Datasets as plain values, and iterators of batches over these datasets.

A `Schema` names the columns of a table and their roles. If the ids are integers, `examples` turns the table into
tensors. For other ids, `fit_encoding` learns how columns become ids and numbers. `encode` applies this encoding, and
`configs` derives tables and features from it. `examples` and `encode` make row data (values with `num_rows` and
`take`), as do `ctr_dataset`, `criteo_npy` and `random_rows`. Splits return the row numbers of each part. `loader` and
`batches` shuffle the rows of a part. `stream_loader` reads sources that are larger than memory. `criteo_tsv`,
`criteo_parquet` and `random_batches` return streams of batches. `prefetch` wraps any iterator of batches.
"""

import funcrec.core as _core
from funcrec.data._augment import crop as crop
from funcrec.data._augment import mask as mask
from funcrec.data._augment import reorder as reorder
from funcrec.data._collate import collate as collate
from funcrec.data._examples import Examples as Examples
from funcrec.data._examples import examples as examples
from funcrec.data._histories import Histories as Histories
from funcrec.data._histories import histories as histories
from funcrec.data._loader import Loader as Loader
from funcrec.data._loader import Position as Position
from funcrec.data._loader import RowData as RowData
from funcrec.data._loader import batches as batches
from funcrec.data._loader import loader as loader
from funcrec.data._loader import num_batches as num_batches
from funcrec.data._loader import take as take
from funcrec.data._negatives import Negatives as Negatives
from funcrec.data._negatives import known_items as known_items
from funcrec.data._negatives import log_q as log_q
from funcrec.data._negatives import popularity_negatives as popularity_negatives
from funcrec.data._negatives import uniform_negatives as uniform_negatives
from funcrec.data._prefetch import prefetch as prefetch
from funcrec.data._splits import k_core as k_core
from funcrec.data._splits import leave_one_out as leave_one_out
from funcrec.data._splits import random_split as random_split
from funcrec.data._splits import split_by_group as split_by_group
from funcrec.data._splits import split_by_time as split_by_time
from funcrec.data._stream_loader import StreamLoader as StreamLoader
from funcrec.data._stream_loader import stream_loader as stream_loader
from funcrec.data.datasets._criteo import CriteoArrays as CriteoArrays
from funcrec.data.datasets._criteo import criteo_npy as criteo_npy
from funcrec.data.datasets._criteo import criteo_tsv as criteo_tsv
from funcrec.data.datasets._criteo import transform_dense as transform_dense
from funcrec.data.datasets._criteo_parquet import criteo_parquet as criteo_parquet
from funcrec.data.datasets._ctr import Column as Column
from funcrec.data.datasets._ctr import CtrData as CtrData
from funcrec.data.datasets._ctr import CtrHistories as CtrHistories
from funcrec.data.datasets._ctr import CtrSplit as CtrSplit
from funcrec.data.datasets._ctr import ctr_dataset as ctr_dataset
from funcrec.data.datasets._histories import GeneratedHistories as GeneratedHistories
from funcrec.data.datasets._histories import generated_histories as generated_histories
from funcrec.data.datasets._movielens import Ratings as Ratings
from funcrec.data.datasets._movielens import movielens_1m as movielens_1m
from funcrec.data.datasets._random_rows import RandomColumn as RandomColumn
from funcrec.data.datasets._random_rows import RandomRows as RandomRows
from funcrec.data.datasets._random_rows import random_batches as random_batches
from funcrec.data.datasets._random_rows import random_rows as random_rows
from funcrec.data.datasets._random_rows import vocabularies_of as vocabularies_of
from funcrec.data.datasets._random_rows import zipf as zipf
from funcrec.data.encoders._encoders import Encoder as Encoder
from funcrec.data.encoders._encoders import Fitted as Fitted
from funcrec.data.encoders._encoders import Place as Place
from funcrec.data.encoders._encoders import chain as chain
from funcrec.data.encoders._encoding import Encoding as Encoding
from funcrec.data.encoders._encoding import configs as configs
from funcrec.data.encoders._encoding import encode as encode
from funcrec.data.encoders._encoding import fit_encoding as fit_encoding
from funcrec.data.encoders._hash_keys import hash_keys as hash_keys
from funcrec.data.encoders._numbers import bucketize as bucketize
from funcrec.data.encoders._numbers import log1p as log1p
from funcrec.data.encoders._numbers import normalize as normalize
from funcrec.data.encoders._vocabulary import FittedVocabulary as FittedVocabulary
from funcrec.data.encoders._vocabulary import hashed as hashed
from funcrec.data.encoders._vocabulary import identity as identity
from funcrec.data.encoders._vocabulary import vocabulary as vocabulary
from funcrec.data.readers._files import Text as Text
from funcrec.data.readers._schema import Schema as Schema
from funcrec.data.readers._stream import read as read
from funcrec.data.readers._stream import stream as stream

_core.publish(globals())
