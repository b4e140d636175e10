"""Adapters as the engine knows them: versions, tiers, loads, and the store that owns them."""
