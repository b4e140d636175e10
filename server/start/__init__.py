"""From flags and settings to a server that runs, and its end."""
