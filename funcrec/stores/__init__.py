"""Stores of records outside of programs, such as the rows of tables larger than memory, with commit and rollback."""

import funcrec.core as _core
from funcrec.stores._file_store import file_store as file_store
from funcrec.stores._store import ColdStore as ColdStore
from funcrec.stores._store import memory_store as memory_store

_core.publish(globals())
