"""Describes where a plan puts each table, and how ranks hold the table."""
