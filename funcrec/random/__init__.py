"""Random numbers as pure functions of an explicit key: a key gives the same numbers on every device and rank.

x = uniform(key, shape)        each use needs a key of its own: split(key), fold_in(key, number)
"""

import funcrec.core as _core
from funcrec.random._draws import bernoulli as bernoulli
from funcrec.random._draws import categorical as categorical
from funcrec.random._draws import normal as normal
from funcrec.random._draws import permutation as permutation
from funcrec.random._draws import randint as randint
from funcrec.random._draws import uniform as uniform

_core.publish(globals())
