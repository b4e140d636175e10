"""Executors: where a StepPlan turns into tokens."""
