"""Newer weights for a package that serves: published, pushed, applied as deltas."""
