"""Claims of blocks and addresses: made for an ADD or ahead of it, given back, collected from nodes that are gone."""
