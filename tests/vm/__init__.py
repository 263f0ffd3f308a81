"""The tier `vm`: other kernels under software emulation."""
