"""The papers' figures: every published number with its source, beside what the simulator says of it."""
