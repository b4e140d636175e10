"""What crosses boundaries: requests, their parameters, plans of steps and results."""
