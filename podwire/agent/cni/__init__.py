"""The launchers' door: frames in, one operation per attachment at a time, replies out."""
