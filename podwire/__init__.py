"""podwire: pod networking for Kubernetes and plain container hosts, with an eBPF datapath."""

__version__ = "0.1.0"
