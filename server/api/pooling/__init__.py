"""Embeddings, scores and classes: `/v1/embeddings`, `/score`, `/rerank`, `/pooling`."""
