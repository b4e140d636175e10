"""Many replicas behind one address."""
