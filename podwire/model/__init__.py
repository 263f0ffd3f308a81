"""Frozen values, ids, errors, configuration: the vocabulary that every layer shares."""
