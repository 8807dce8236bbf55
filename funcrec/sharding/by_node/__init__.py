"""Towers: groups of features whose tables, lookups and interactions are on one node of a mesh."""
