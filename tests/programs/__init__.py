"""Code that several tests share: programs that ranks import by name, generated calls and tables of cases. `tests` is
on the path (pyproject.toml)."""
