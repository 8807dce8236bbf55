"""Functions whose bits do not depend on the batch, on threads or on the processor."""

import funcrec.core as _core
from funcrec.invariance._mode import invariant as invariant

_core.publish(globals())
