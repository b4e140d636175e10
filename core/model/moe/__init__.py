"""Mixtures of experts: their weights, their step, and what adapters add to them."""
