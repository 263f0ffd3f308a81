"""The parts of a CiliumNetworkPolicy's rule: whom it speaks of, and which ports."""
