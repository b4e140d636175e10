"""Copies between host images and the arena, layer by layer."""
