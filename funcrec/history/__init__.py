"""Logs of what steps changed. A log can undo steps, and knows which rows a server lacks."""

import funcrec.core as _core
from funcrec.history._delta import ChangedRows as ChangedRows
from funcrec.history._delta import Delta as Delta
from funcrec.history._delta import apply_delta as apply_delta
from funcrec.history._delta import delta as delta
from funcrec.history._ids import ChangedIds as ChangedIds
from funcrec.history._logged import Logged as Logged
from funcrec.history._logged import logged as logged
from funcrec.history._logged import rewind as rewind

_core.publish(globals())
