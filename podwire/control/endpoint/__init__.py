"""The life of an endpoint: states, queue, regeneration, restore, check."""
