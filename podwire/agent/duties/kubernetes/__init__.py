"""What the agent does only in Kubernetes: Events, ranges that follow the core Node, contests between nodes."""
