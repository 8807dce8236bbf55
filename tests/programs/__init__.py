"""Code that several tests share: programs that ranks import by name, generated calls and tables of cases.

pyproject.toml puts `tests` on the import path."""
