"""Placement: which requests move to which replica, and which replicas get adapters in advance. Pure code, no I/O."""
