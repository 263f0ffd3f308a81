"""What Kubernetes says of this node: its core Node, and the pods that are bound to it."""
