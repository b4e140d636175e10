"""Benchmarks of the engine, on a GPU or a CPU, in one command: `python -m chorus.perf.bench --quick --out DIR`."""
