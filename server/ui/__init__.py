"""The operator's page: static files, and the stream of events that it draws."""
