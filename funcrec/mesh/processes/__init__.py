"""Processes that are ranks: their groups, what they tell one another, and whether they were told alike."""
