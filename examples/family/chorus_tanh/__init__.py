"""Llama with a dynamic tanh in place of each norm, for Chorus."""
