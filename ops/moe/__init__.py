"""Mixtures of experts: routing, and the products of chosen experts."""
