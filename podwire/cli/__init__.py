"""The `podwire` command."""

# size: one module per noun of the command line
