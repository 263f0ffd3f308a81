"""The node's durable memory: one record per attachment, written before the first side effect."""
