"""Realization: what was resolved comes into the datapath, slot by slot; and what became of it."""
