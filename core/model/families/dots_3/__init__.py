"""Dots 3 Note: how its configuration is read, and its layers."""
