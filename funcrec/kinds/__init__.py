"""Tables that are not plain: stored as codes, trained for such codes, or with rows for ids that come and go."""

import funcrec.core as _core
from funcrec.kinds._admission import Choice as Choice
from funcrec.kinds._admission import Turnover as Turnover
from funcrec.kinds._admission import admit as admit
from funcrec.kinds._admission import choose as choose
from funcrec.kinds._admission import expire as expire
from funcrec.kinds._admission import settle as settle
from funcrec.kinds._admission import settled as settled
from funcrec.kinds._codes import CODES as CODES
from funcrec.kinds._codes import bits_of as bits_of
from funcrec.kinds._codes import dtype_problems as dtype_problems
from funcrec.kinds._codes import named_dtypes as named_dtypes
from funcrec.kinds._columns import changed_slots as changed_slots
from funcrec.kinds._columns import columns_of as columns_of
from funcrec.kinds._dynamic import STORED as STORED
from funcrec.kinds._dynamic import DynamicTables as DynamicTables
from funcrec.kinds._dynamic import VocabularyConfig as VocabularyConfig
from funcrec.kinds._dynamic import admit_batch as admit_batch
from funcrec.kinds._dynamic import configs_of as configs_of
from funcrec.kinds._dynamic import dynamic_tables as dynamic_tables
from funcrec.kinds._dynamic import feature_problems as feature_problems
from funcrec.kinds._dynamic import ids_of_batch as ids_of_batch
from funcrec.kinds._dynamic import ids_of_columns as ids_of_columns
from funcrec.kinds._dynamic import owner_problems as owner_problems
from funcrec.kinds._dynamic import plain_problems as plain_problems
from funcrec.kinds._dynamic import stored_problems as stored_problems
from funcrec.kinds._fake_quantized import FakeQuantizedTables as FakeQuantizedTables
from funcrec.kinds._fake_quantized import fake_quantize as fake_quantize
from funcrec.kinds._quantized import QuantizedTables as QuantizedTables
from funcrec.kinds._quantized import dequantize as dequantize
from funcrec.kinds._quantized import quantize as quantize
from funcrec.kinds._quantized import stored as stored
from funcrec.kinds._renewal import NewRows as NewRows
from funcrec.kinds._renewal import draw as draw
from funcrec.kinds._renewal import first_slots as first_slots
from funcrec.kinds._renewal import grow as grow
from funcrec.kinds._renewal import initializer_problems as initializer_problems
from funcrec.kinds._renewal import matrix_of as matrix_of
from funcrec.kinds._renewal import renew as renew
from funcrec.kinds._renewal import with_new_rows as with_new_rows
from funcrec.kinds._rounding import as_stored as as_stored
from funcrec.kinds._rounding import row_keys as row_keys
from funcrec.kinds._stored_rows import cut_columns as cut_columns
from funcrec.kinds._stored_rows import join_columns as join_columns
from funcrec.kinds._stored_rows import stored_width as stored_width
from funcrec.kinds._vocabulary import Vocabulary as Vocabulary
from funcrec.kinds._vocabulary import find as find
from funcrec.kinds._vocabulary import vocabulary as vocabulary
from funcrec.kinds._vocabulary import vocabulary_problems as vocabulary_problems
from funcrec.kinds._vocabulary_items import vocabulary_items as vocabulary_items
from funcrec.kinds._vocabulary_items import vocabulary_of as vocabulary_of

_core.publish(globals())
