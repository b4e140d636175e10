"""Placement: which requests move to which replica, and which adapters lie where beforehand. Pure code, no I/O."""
