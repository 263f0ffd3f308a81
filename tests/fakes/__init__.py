"""Stand-ins for the world; each passes the contract suite of the real thing."""
