"""Tables in few bits: what is read where a model is served, and how one is trained for it."""

import funcrec.core as _core
from funcrec.quantized._fake import PLACED as PLACED
from funcrec.quantized._fake import FakeQuantizedTables as FakeQuantizedTables
from funcrec.quantized._fake import Placed as Placed
from funcrec.quantized._fake import fake_quantize as fake_quantize
from funcrec.quantized._forms import CODES as CODES
from funcrec.quantized._forms import bits_of as bits_of
from funcrec.quantized._forms import dtype_problems as dtype_problems
from funcrec.quantized._forms import named_dtypes as named_dtypes
from funcrec.quantized._rounded import as_stored as as_stored
from funcrec.quantized._rounded import row_keys as row_keys
from funcrec.quantized._rows import cut_columns as cut_columns
from funcrec.quantized._rows import join_columns as join_columns
from funcrec.quantized._rows import stored_width as stored_width
from funcrec.quantized._tables import QUANTIZE as QUANTIZE
from funcrec.quantized._tables import QuantizedTables as QuantizedTables
from funcrec.quantized._tables import dequantize as dequantize
from funcrec.quantized._tables import quantize as quantize
from funcrec.quantized._tables import stored as stored

_core.publish(globals())
