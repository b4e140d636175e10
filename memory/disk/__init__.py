"""Cached KV in files: the tier below host memory."""
