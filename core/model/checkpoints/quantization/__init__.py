"""Formats of quantised weights, which are kept dequantised."""
