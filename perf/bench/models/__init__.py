"""Models that benchmarks run, and adapters for them: their shapes, and random weights."""
