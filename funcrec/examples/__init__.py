"""Programs that use funcrec as a user would: `python -m funcrec.examples.ctr --help`.

.. include:: OWN_DATA.md
.. include:: README.md
.. include:: CLUSTERS.md
"""

import funcrec.core as _core

_core.publish(globals(), later={"ctr": _core.module_later("funcrec.examples.ctr")})
