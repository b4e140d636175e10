"""Compares results with baselines, beyond differences that noise explains."""
