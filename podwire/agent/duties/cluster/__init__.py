"""Follow the other nodes, publish this one, and keep the kernel in line with the plan."""
