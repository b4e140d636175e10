"""The papers' figures: every published number with its source, and the simulator's value."""
