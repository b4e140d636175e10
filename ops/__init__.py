"""Operators on tensors: each has one signature for all its backends, and a plain reference."""
