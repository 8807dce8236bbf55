"""Retrieval: find, among all items, those whose vectors have the highest scores with the vector of a query."""

import funcrec.core as _core
from funcrec.retrieval._index import Index as Index
from funcrec.retrieval._index import build_index as build_index
from funcrec.retrieval._index import search_index as search_index
from funcrec.retrieval._top_k import top_k as top_k

_core.publish(globals())
