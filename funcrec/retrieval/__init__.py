"""Retrieval: among all items, find those whose vectors have the highest scores with a query's."""

import funcrec.core as _core
from funcrec.retrieval._index import Index as Index
from funcrec.retrieval._index import build_index as build_index
from funcrec.retrieval._index import search_index as search_index
from funcrec.retrieval._top_k import top_k as top_k

_core.publish(globals())
