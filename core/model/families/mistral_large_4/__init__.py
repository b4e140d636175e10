"""Mistral Large 4: how its configuration is read, and its layers."""
