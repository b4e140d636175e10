"""Routes that load, name, send and scale adapters."""
