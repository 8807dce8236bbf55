"""Converts to and from TorchRec's values, configs and state dicts, FBGEMM's quantised rows, torch's nested tensors and
modules.

Optional packages are imported when a function that needs them is called.

.. include:: README.md
"""

import funcrec.core as _core
from funcrec.interop._module import module as module
from funcrec.interop._nested import from_nested as from_nested
from funcrec.interop._nested import to_nested as to_nested
from funcrec.interop._quantized import from_fbgemm as from_fbgemm
from funcrec.interop._quantized import to_fbgemm as to_fbgemm
from funcrec.interop._state import load_torchrec_state_dict as load_torchrec_state_dict
from funcrec.interop._state import to_torchrec_state_dict as to_torchrec_state_dict
from funcrec.interop._torchrec import from_torchrec as from_torchrec
from funcrec.interop._torchrec import to_torchrec as to_torchrec

_core.publish(globals())
