"""Side-by-side measurements against peers on one machine; run by scripts/bench, never as tests."""
