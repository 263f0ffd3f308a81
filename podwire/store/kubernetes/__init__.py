"""The store in the Kubernetes API: own kinds as custom resources, and Kubernetes' own objects, read as they are."""
