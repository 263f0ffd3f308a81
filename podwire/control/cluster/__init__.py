"""Other nodes: what each one publishes, and what this one concludes from it. Only `publish` writes objects."""
