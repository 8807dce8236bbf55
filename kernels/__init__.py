"""The operations on tables as functions on tensors: contracts in `ops`, readable torch in `reference`.

This package imports torch only. An operation takes and returns tensors and static integers, writes to no argument and
has no autograd rule: its transpose is another operation.
"""
