"""The thread that owns the engine, the way in and out of it, and what it counts."""
