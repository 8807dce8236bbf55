"""Readers of columns from files and frames: CSV, Parquet and Arrow data, read whole or as a stream, with a schema."""
