"""Every GPU measurement behind one command: `python -m chorus.perf.gpu --quick --out DIR`."""
