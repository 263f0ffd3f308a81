"""The store in etcd v3, for several machines without Kubernetes: objects, watches and leases over its JSON gateway."""
