"""Measurements of the engine, on a GPU or a CPU, behind one command: `python -m chorus.perf.bench --quick --out DIR`."""
