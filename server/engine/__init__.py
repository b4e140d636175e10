"""The engine's thread, the interface to it, and its metrics."""
