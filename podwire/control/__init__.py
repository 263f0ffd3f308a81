"""Decisions. No system calls: the world comes in through the interfaces of `model`."""
