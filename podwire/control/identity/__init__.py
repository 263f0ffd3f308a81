"""Identities: from labels to numbers that mean the same on every node."""
