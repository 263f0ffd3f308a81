"""Checks of addresses: whether all parts that should know of one agree about its owner."""
