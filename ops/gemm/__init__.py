"""GEMMs: with packed weights on CPUs, for few rows on GPUs, with quantised weights, with rows in FP8."""
