"""Processes that are ranks: their groups, what they say to each other, and whether they have values of one form."""
