"""What is installed: the compiled files of this build, and what a container runtime gets of it."""
