"""Engines under measurement, each in a process of its own behind one interface.

A contender is a class with `open(job) -> info`, `run(case) -> result` and `close()`; `process` has both ends of the
pipe to it. Peers' modules import nothing of chorus but `cpu.workload`, so that they run in any virtual environment.
"""
