"""A real Kubernetes cluster on one machine: its nodes are namespaces, its programs the unmodified ones."""
