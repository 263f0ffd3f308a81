"""Nodes and pods on one machine: real agents and real CNI calls in network namespaces."""
