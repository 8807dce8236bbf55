"""To and from what others have: TorchRec's values, configs and state dicts, torch's nested tensors and modules.

Optional packages are imported when a function that needs them is called.
"""

import funcrec.core as _core
from funcrec.interop._torchrec import from_torchrec as from_torchrec
from funcrec.interop._torchrec import to_torchrec as to_torchrec

_core.publish(globals())
