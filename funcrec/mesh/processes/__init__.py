"""Ranks that are processes: their groups, the messages they exchange, and checks that all got the same arguments."""
