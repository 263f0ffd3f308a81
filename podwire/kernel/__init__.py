"""Linux: one narrow module per kind of system call."""

# size: one module per kind of system call
