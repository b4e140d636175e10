"""Costs of steps, loads, merges, swaps and moves, for scheduler, router, merge policy and simulator."""
