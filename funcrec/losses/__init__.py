"""Losses of predictions and labels, with weights of the examples: `loss(predictions, label, weight=None) -> f[]`."""

import funcrec.core as _core
from funcrec.losses._bce import bce as bce
from funcrec.losses._mean import weighted_mean as weighted_mean

_core.publish(globals())
