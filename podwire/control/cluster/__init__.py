"""Other nodes: what each says of itself, and what this one makes of it. Only `publish` writes objects."""
