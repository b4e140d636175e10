"""ERNIE 4.5 VL: how its configuration is read, and its layers."""
