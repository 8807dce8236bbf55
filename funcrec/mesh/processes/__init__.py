"""Ranks that are processes: groups of ranks, exchanges of values between ranks, and checks that arguments are equal."""
