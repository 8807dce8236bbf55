"""Encoders that turn columns into ids or numbers, such as vocabularies and buckets, and encodings of whole tables."""
