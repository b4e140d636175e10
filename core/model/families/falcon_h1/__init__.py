"""Falcon-H1: how its configuration is read, and its layers."""
