"""Values that cross boundaries: requests, their parameters, plans of steps and results."""
