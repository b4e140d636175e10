"""Clusters: several replicas served at one address."""
