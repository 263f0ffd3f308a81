"""Installation: which files a container runtime gets from podwire, in which order, and what stands in their way."""
