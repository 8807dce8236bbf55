"""Rows and slots that go from rank to rank when a plan changes."""
