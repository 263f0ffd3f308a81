"""Intent to kernel objects: programs, maps, devices, inventory."""
