"""The code that a step enters."""
