"""Stores of adapters that are not registered: rules that name them, checked downloads, and a cache of files."""
