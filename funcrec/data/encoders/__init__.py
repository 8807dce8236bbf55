"""Encoders of columns into ids and numbers: vocabularies, buckets, logarithms, and the encoding of all columns."""
