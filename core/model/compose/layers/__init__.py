"""Layers: the one that most families have, and those of families with ideas of their own."""
