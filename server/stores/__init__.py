"""Stores of adapters that are not registered: rules for names, checked downloads, and a cache of files."""
