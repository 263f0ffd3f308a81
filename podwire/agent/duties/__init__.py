"""What the agent does on its own for as long as it runs: follow the store, apply, publish, repair."""
