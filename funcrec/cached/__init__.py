"""Tables larger than memory: rows in stores, of which those that training reads are in memory."""

import funcrec.core as _core
from funcrec.cached._cached_step import CachedStep as CachedStep
from funcrec.cached._cached_step import cached_step as cached_step
from funcrec.cached._cached_tables import CacheConfig as CacheConfig
from funcrec.cached._cached_tables import cached_tables as cached_tables
from funcrec.cached._table_store import TableStore as TableStore
from funcrec.cached._table_store import table_store as table_store

_core.publish(globals())
