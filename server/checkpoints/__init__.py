"""Checkpoints from the package index and from GGUF files."""
