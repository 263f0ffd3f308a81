"""The node agent: doors (sockets, signals, loops) around the decisions of `control`."""
