"""Ops, a file for each noun: what they read, write and compute with, and who runs them."""
