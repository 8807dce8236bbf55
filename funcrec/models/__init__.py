"""Models of click-through and of retrieval. A model is tables, features and three pure functions.

logits = model.apply(params, batch),   params = model.init(key)
"""

import funcrec.core as _core
from funcrec.models._dcn import dcnv2 as dcnv2
from funcrec.models._dcn import dlrm_dcnv2 as dlrm_dcnv2
from funcrec.models._dcn import mlperf_dlrm_dcnv2 as mlperf_dlrm_dcnv2
from funcrec.models._deep import deepfm as deepfm
from funcrec.models._deep import wide_deep as wide_deep
from funcrec.models._din import din as din
from funcrec.models._dlrm import dlrm as dlrm
from funcrec.models._dlrmv3 import mlperf_dlrmv3 as mlperf_dlrmv3
from funcrec.models._gru4rec import gru4rec as gru4rec
from funcrec.models._hstu import HstuRanker as HstuRanker
from funcrec.models._hstu import hstu_ranker as hstu_ranker
from funcrec.models._hstu import ranker_loss as ranker_loss
from funcrec.models._hstu_history import History as History
from funcrec.models._hstu_next import hstu as hstu
from funcrec.models._ml1m import ml1m as ml1m
from funcrec.models._model import Model as Model
from funcrec.models._model import linear_twins as linear_twins
from funcrec.models._model import loss as loss
from funcrec.models._model import merge_stats as merge_stats
from funcrec.models._model import num_parameters as num_parameters
from funcrec.models._next_item import next_item_loss as next_item_loss
from funcrec.models._sasrec import sasrec as sasrec
from funcrec.models._sequence import SequenceModel as SequenceModel
from funcrec.models._shallow import fm as fm
from funcrec.models._shallow import lr as lr
from funcrec.models._simple_deepfm import simple_deepfm as simple_deepfm
from funcrec.models._summary import summary as summary
from funcrec.models._two_tower import TwoTower as TwoTower
from funcrec.models._two_tower import in_batch_softmax as in_batch_softmax
from funcrec.models._two_tower import in_batch_softmax_loss as in_batch_softmax_loss
from funcrec.models._two_tower import two_tower as two_tower

_core.publish(globals())
