"""What the agent does unasked for as long as it runs: follow the store, apply, publish, repair."""
