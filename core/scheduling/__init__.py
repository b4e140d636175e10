"""Decisions: which requests are admitted, run or wait, and what a step computes."""
