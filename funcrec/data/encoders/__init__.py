"""What makes numbers and rows of columns: vocabularies, buckets, logarithms, and the encoding that was learned."""
