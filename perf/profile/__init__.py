"""Profiles of steps: ranges, nsys and ncu commands, and tables of what they recorded."""
