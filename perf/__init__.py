"""Workloads, benchmarks, the simulator and the fleet planner."""
