"""The operator's page: static files, and its stream of events."""
