"""Adapters in the weights: making merged weights, the modes of steps, and the policies that choose them (dLoRA)."""
