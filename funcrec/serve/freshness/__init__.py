"""Newer weights for a running package: published, pushed, applied as deltas."""
