"""Zamba and Zamba 2: how configurations are read, and their layers."""
