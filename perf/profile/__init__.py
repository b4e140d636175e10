"""Where the time of a step goes: ranges, nsys and ncu commands, and tables of what they recorded."""
