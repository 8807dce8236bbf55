"""Bags of different lengths in one buffer, for one feature or several, and pooled features in one tensor."""

from funcrec.jagged._attention import jagged_attention as jagged_attention
from funcrec.jagged._buckets import bucket as bucket
from funcrec.jagged._buckets import pad_to_bucket as pad_to_bucket
from funcrec.jagged._checks import int_problems as int_problems
from funcrec.jagged._checks import offset_value_problems as offset_value_problems
from funcrec.jagged._filter import bag_filter as bag_filter
from funcrec.jagged._filter import drop_ids as drop_ids
from funcrec.jagged._jagged import JaggedTensor as JaggedTensor
from funcrec.jagged._jagged import bag_ids as bag_ids
from funcrec.jagged._jagged import take_ranges as take_ranges
from funcrec.jagged._keyed_checks import keyed_hint as keyed_hint
from funcrec.jagged._keyed_checks import keyed_parts as keyed_parts
from funcrec.jagged._keyed_jagged import KeyedJaggedTensor as KeyedJaggedTensor
from funcrec.jagged._keyed_jagged import check_ids as check_ids
from funcrec.jagged._keyed_tensor import KeyedTensor as KeyedTensor
from funcrec.jagged._keyed_tensor import regroup as regroup
from funcrec.jagged._primitives import is_concrete as is_concrete
from funcrec.jagged._primitives import offsets_of as offsets_of
from funcrec.jagged._reductions import bag_reduce as bag_reduce
from funcrec.jagged._reductions import bag_softmax as bag_softmax
from funcrec.jagged._weights import unweighted_places as unweighted_places
