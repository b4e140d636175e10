"""Every GPU measurement behind one command: `python -m chorus.perf.bench --quick --out DIR`."""
