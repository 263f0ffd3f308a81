"""Decisions. No system calls: the outside world is reached through the interfaces of `model`."""
