"""Patterns of module names, as adapters' configurations have them, matched in all of a model's names at once."""
