"""Datasets that papers train on: MovieLens-1M, data in the formats of Criteo, and generated rows."""
