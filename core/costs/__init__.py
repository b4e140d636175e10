"""What steps, loads, merges, swaps and moves cost: one module for scheduler, router, merge policy and simulator."""
