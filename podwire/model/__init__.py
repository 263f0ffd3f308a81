"""Frozen values, ids, errors, configuration: the vocabulary that every layer shares."""
# size: the vocabulary, one module per word of it
