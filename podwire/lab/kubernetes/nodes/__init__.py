"""The nodes of the cluster: what makes a namespace look like a machine, what runs there, and its images."""
