"""The `podwire` command."""
