"""Documents as people, agents and Kubernetes write them: read value by value, with every fault named."""
