"""Executors: they turn a StepPlan into tokens."""
