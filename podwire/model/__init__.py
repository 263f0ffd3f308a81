"""Frozen values, ids, errors, configuration: the words every layer shares."""
