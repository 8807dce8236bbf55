"""Pipelines, which make batches ready while a step computes."""
