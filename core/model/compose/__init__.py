"""How a layer is written: its ops, each with its weights, in one pass."""
