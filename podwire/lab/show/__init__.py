"""What a lab shows: the demo, the drop that is seen, the matrix of pods that reach each other."""
