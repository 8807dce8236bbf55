"""The operations on tables as functions on tensors. `ops` has the contracts, `reference` the operations in plain torch.

This package imports torch only. An operation takes and returns tensors and static integers, and writes to no argument.
An operation has no autograd rule: its transpose is another operation.
"""
