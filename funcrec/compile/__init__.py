"""`jit` and its parts: traces, writes after a program, surroundings of a program, Inductor's options, recordings."""

import funcrec.core as _core
from funcrec.compile._ambient import is_transformed as is_transformed
from funcrec.compile._ambient import lowered_products as lowered_products
from funcrec.compile._ambient import surroundings as surroundings
from funcrec.compile._apart import FOR_EXPORT as FOR_EXPORT
from funcrec.compile._apart import apart as apart
from funcrec.compile._apart import imported as imported
from funcrec.compile._control import cond as cond
from funcrec.compile._control import fori_loop as fori_loop
from funcrec.compile._control import while_loop as while_loop
from funcrec.compile._cut_stale import RowsAhead as RowsAhead
from funcrec.compile._cut_stale import cut_stale as cut_stale
from funcrec.compile._debug_print import debug_print as debug_print
from funcrec.compile._donated import Donated as Donated
from funcrec.compile._donated import donated_message as donated_message
from funcrec.compile._eval_shape import eval_shape as eval_shape
from funcrec.compile._jit import jit as jit
from funcrec.compile._keys import form_key as form_key
from funcrec.compile._lower import Lowered as Lowered
from funcrec.compile._lower import Sent as Sent
from funcrec.compile._parts import is_staging as is_staging
from funcrec.compile._split_step import Halves as Halves
from funcrec.compile._split_step import cut as cut
from funcrec.compile._staged_control import is_followed as is_followed
from funcrec.compile._staged_control import staged_scan as staged_scan
from funcrec.compile._trace import stage as stage
from funcrec.compile.backend._decompositions import DECOMPOSITIONS as DECOMPOSITIONS
from funcrec.compile.backend._device_names import plain_device_names as plain_device_names
from funcrec.compile.backend._inductor import OPTIONS as OPTIONS
from funcrec.compile.backend._inductor import compile_graph as compile_graph
from funcrec.compile.backend._inductor import knowing as knowing
from funcrec.compile.backend._inductor import need_compiler as need_compiler
from funcrec.compile.backend._products import two_products as two_products

_core.publish(globals())
