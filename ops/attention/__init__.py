"""Attention over the paged KV cache, by heads or by latents (MLA)."""
