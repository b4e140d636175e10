"""Commands that attack a server, an engine or its adapters and check that other clients are not hurt."""
