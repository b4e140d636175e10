"""Gemma 3n: how its configuration is read, and its layers."""
