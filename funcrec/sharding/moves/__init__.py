"""Moves rows and slots between ranks when a plan changes."""
