"""Workloads, benchmarks and profiling."""
