"""Newer weights for a running package: a training run publishes them, and servers get and apply them as deltas."""
