"""Engines under measurement, each in a process of its own behind one interface.

A contender is a class with `open(job) -> info`, `run(case) -> result` and `close()`; `child` serves one over JSON
lines, `process` is the other end. Peers' modules import nothing of chorus but `cpu_workload`, so that they run in any
virtual environment.
"""
