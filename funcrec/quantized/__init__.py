"""Tables in few bits: what is read where a model is served, and how one is trained for it."""

import funcrec.core as _core
from funcrec.quantized._fake import FakeQuantizedTables as FakeQuantizedTables
from funcrec.quantized._fake import fake_quantize as fake_quantize
from funcrec.quantized._tables import QuantizedTables as QuantizedTables
from funcrec.quantized._tables import dequantize as dequantize
from funcrec.quantized._tables import quantize as quantize

_core.publish(globals())
