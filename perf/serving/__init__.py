"""Load against an OpenAI-compatible server over HTTP, and what its users would see of it."""
