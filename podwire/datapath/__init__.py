"""Turn an intent into kernel objects: programs, maps, devices, inventory."""

# size: one module per kind of kernel object
