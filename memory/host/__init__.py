"""Adapters in host memory: images in the layout of their pages, and the reads that fill them."""
