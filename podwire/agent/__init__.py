"""The node agent: doors (sockets, signals, loops) around the decisions of `control`."""

# size: one module per door and per thing that one process has once
