"""Sums over tensor-parallel ranks, on CPUs and on GPUs."""
