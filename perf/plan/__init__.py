"""`chorus plan`: the cheapest cluster that meets an SLO under a recorded load, found by simulation."""
