"""Decisions: who is admitted, who runs, who waits, and what a step computes."""
