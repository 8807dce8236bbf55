"""Readers of columns from files and frames: CSV, Parquet and Arrow, whole or as a stream, with a schema."""
