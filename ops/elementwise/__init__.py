"""Norms, rotary embedding, gated activations and factors: each token by itself."""
