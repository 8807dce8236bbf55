"""Batches that are made ready while a step computes."""
