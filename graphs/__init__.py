"""Buckets, static buffers, capture and replay of decode steps."""
