"""The built-in demonstration model and its skills."""
