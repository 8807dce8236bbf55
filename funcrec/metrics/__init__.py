"""Metrics as values: `init`, `update` and `compute` on states that can be added."""

import funcrec.core as _core
from funcrec.metrics._auc import auc as auc
from funcrec.metrics._auc import auc_error as auc_error
from funcrec.metrics._auc import exact_auc as exact_auc
from funcrec.metrics._auc import grouped_auc as grouped_auc
from funcrec.metrics._classes import multiclass_accuracy as multiclass_accuracy
from funcrec.metrics._classes import top_k_accuracy as top_k_accuracy
from funcrec.metrics._combined import grouped as grouped
from funcrec.metrics._combined import recalibrated as recalibrated
from funcrec.metrics._combined import unweighted as unweighted
from funcrec.metrics._combined import windowed as windowed
from funcrec.metrics._histogram import average_precision as average_precision
from funcrec.metrics._histogram import recall_at_precision as recall_at_precision
from funcrec.metrics._metric import Metric as Metric
from funcrec.metrics._metric import collect as collect
from funcrec.metrics._metric import merge as merge
from funcrec.metrics._retrieval import coverage as coverage
from funcrec.metrics._retrieval import hit_rate as hit_rate
from funcrec.metrics._retrieval import mean_average_precision as mean_average_precision
from funcrec.metrics._retrieval import mrr as mrr
from funcrec.metrics._retrieval import ndcg as ndcg
from funcrec.metrics._retrieval import novelty as novelty
from funcrec.metrics._retrieval import precision as precision
from funcrec.metrics._retrieval import recall as recall
from funcrec.metrics._sums import accuracy as accuracy
from funcrec.metrics._sums import binary_precision as binary_precision
from funcrec.metrics._sums import binary_recall as binary_recall
from funcrec.metrics._sums import calibration as calibration
from funcrec.metrics._sums import ctr as ctr
from funcrec.metrics._sums import log_loss as log_loss
from funcrec.metrics._sums import mae as mae
from funcrec.metrics._sums import mean_prediction as mean_prediction
from funcrec.metrics._sums import mse as mse
from funcrec.metrics._sums import nmse as nmse
from funcrec.metrics._sums import normalized_entropy as normalized_entropy
from funcrec.metrics._sums import positive_normalized_entropy as positive_normalized_entropy
from funcrec.metrics._sums import r2 as r2
from funcrec.metrics._sums import rmse as rmse

_core.publish(globals())
