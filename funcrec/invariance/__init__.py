"""Functions whose bits do not depend on the batch, on threads or on the processor."""

import funcrec.core as _core
from funcrec.invariance._exported import check_operators as check_operators
from funcrec.invariance._exported import replacements as replacements
from funcrec.invariance._mode import invariant as invariant
from funcrec.invariance._mode import plain_of as plain_of

_core.publish(globals())
