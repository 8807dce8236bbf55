"""Data that papers train on: MovieLens-1M, Criteo's formats, and generated rows."""
