"""Chorus: thousands of LoRA adapters over one resident base model."""

__version__ = "0.1.0"
