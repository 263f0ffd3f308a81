"""Addresses: who holds which, and which comes next."""
