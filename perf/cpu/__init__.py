"""The CPU engine beside its peers: rates, limits, and parts measured alone."""
