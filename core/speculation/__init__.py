"""Speculation: tokens proposed for sequences, which a step verifies together."""
