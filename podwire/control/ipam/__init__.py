"""Addresses: which endpoint holds which, and which is given next."""
