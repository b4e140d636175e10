"""Commands that attack a server, an engine or its adapters and check that nobody else is hurt."""
