"""Whether a result is worse than its baseline, beyond what noise explains."""
