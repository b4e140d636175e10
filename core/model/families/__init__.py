"""Families of checkpoints: how each one's configuration is read, and what its layers compute."""
