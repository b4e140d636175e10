"""Models as files: from the package index, and from GGUF."""
