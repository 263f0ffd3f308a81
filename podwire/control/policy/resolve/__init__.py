"""Resolution: from rules and identities to the entries of each slot, in proportion to what changed."""
