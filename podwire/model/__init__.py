"""Frozen values, ids, errors, configuration: the vocabulary that every layer shares."""

# size: one module per word that every layer uses
