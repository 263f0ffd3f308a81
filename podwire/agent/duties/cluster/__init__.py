"""Follow the other nodes, publish this one, and keep the kernel as planned."""
