"""Cohere 2 MoE: how its configuration is read, and its layers."""
