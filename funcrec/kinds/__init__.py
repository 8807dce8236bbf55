"""Tables in few bits: tables stored as codes, to serve a model, and float tables that are trained for such codes."""

import funcrec.core as _core
from funcrec.kinds._codes import CODES as CODES
from funcrec.kinds._codes import bits_of as bits_of
from funcrec.kinds._codes import dtype_problems as dtype_problems
from funcrec.kinds._codes import named_dtypes as named_dtypes
from funcrec.kinds._fake_quantized import FakeQuantizedTables as FakeQuantizedTables
from funcrec.kinds._fake_quantized import fake_quantize as fake_quantize
from funcrec.kinds._quantized import QuantizedTables as QuantizedTables
from funcrec.kinds._quantized import dequantize as dequantize
from funcrec.kinds._quantized import quantize as quantize
from funcrec.kinds._quantized import stored as stored
from funcrec.kinds._rounding import as_stored as as_stored
from funcrec.kinds._rounding import row_keys as row_keys
from funcrec.kinds._stored_rows import cut_columns as cut_columns
from funcrec.kinds._stored_rows import join_columns as join_columns
from funcrec.kinds._stored_rows import stored_width as stored_width

_core.publish(globals())
