"""The parts of a CiliumNetworkPolicy's rule: its peers and its ports."""
