"""Where a plan puts each table, and how ranks hold it."""
