"""Layers as pairs of pure functions on plain trees of tensors.

y = layer.apply(params, x),   params = layer.init(key)
"""

import funcrec.core as _core
from funcrec.nn._batch_norm import batch_norm as batch_norm
from funcrec.nn._cross import cross as cross
from funcrec.nn._cross import cross_network as cross_network
from funcrec.nn._cross import mixture_cross_network as mixture_cross_network
from funcrec.nn._cross import vector_cross_network as vector_cross_network
from funcrec.nn._dropout import dropout as dropout
from funcrec.nn._experts import mmoe as mmoe
from funcrec.nn._experts import ple as ple
from funcrec.nn._gru import gru as gru
from funcrec.nn._hstu import HstuLayer as HstuLayer
from funcrec.nn._hstu import Kept as Kept
from funcrec.nn._hstu import hstu_layer as hstu_layer
from funcrec.nn._interactions import dot_interaction as dot_interaction
from funcrec.nn._interactions import factorization_machine as factorization_machine
from funcrec.nn._layer import Layer as Layer
from funcrec.nn._layer import fan_out_normal as fan_out_normal
from funcrec.nn._layer import normal as normal
from funcrec.nn._layer import xavier_normal as xavier_normal
from funcrec.nn._layer import zeros as zeros
from funcrec.nn._layer_norm import layer_norm as layer_norm
from funcrec.nn._layer_norm import swish_layer_norm as swish_layer_norm
from funcrec.nn._mlp import linear as linear
from funcrec.nn._mlp import mlp as mlp
from funcrec.nn._position import position_weights as position_weights
from funcrec.nn._sasrec import position_embedding as position_embedding
from funcrec.nn._sasrec import sasrec_block as sasrec_block
from funcrec.nn._target_attention import target_attention as target_attention

_core.publish(globals())
