"""Linux: one narrow module per kind of system call."""
