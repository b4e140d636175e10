"""Adapters in the engine: versions, tiers, loads, and the store that owns them."""
