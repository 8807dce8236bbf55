"""The operations on tables as functions on tensors. `ops` holds their contracts, `reference` their form in plain torch.

This package imports torch only. An operation takes and returns tensors and static integers, and writes to no argument.
It has no autograd rule: its transpose is another operation.
"""
