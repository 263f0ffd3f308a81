"""Checks of addresses: whether those who should know of one agree about whose it is."""
