"""Results held against baselines, beyond what noise explains."""
