"""Ranks that are processes: their groups, what they say to each other, and checks that all got the same arguments."""
