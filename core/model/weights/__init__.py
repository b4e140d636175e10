"""Weights of a model: the slots that they go to, how they are read, shared among ranks, and kept."""
