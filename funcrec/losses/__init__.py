"""Losses of predictions and labels, with weights of examples: `loss(predictions, label, weight=None) -> f[]`."""

import funcrec.core as _core
from funcrec.losses._bce import bce as bce
from funcrec.losses._classes import contrastive as contrastive
from funcrec.losses._classes import cross_entropy as cross_entropy
from funcrec.losses._classes import in_batch_softmax as in_batch_softmax
from funcrec.losses._full_softmax import full_softmax as full_softmax
from funcrec.losses._mean import weighted_mean as weighted_mean
from funcrec.losses._numbers import huber as huber
from funcrec.losses._numbers import mse as mse
from funcrec.losses._sampled import gbce as gbce
from funcrec.losses._sampled import sampled_softmax as sampled_softmax
from funcrec.losses._tasks import multi_task as multi_task

_core.publish(globals())
