"""Packets in, packets out: what the BPF programs do with every kind of frame, on the running kernel."""
