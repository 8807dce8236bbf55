"""What several tests run: programs that ranks import by name, generated calls, tables
of cases. `tests` is on the path (pyproject.toml)."""
