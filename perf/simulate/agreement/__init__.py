"""A real cluster and its prediction, side by side."""
