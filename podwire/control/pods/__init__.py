"""Pods of this node as the API server says them: labels and ports that an endpoint has because of its Pod object."""
