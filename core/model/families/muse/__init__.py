"""Muse Glimmer and Muse Spark: how configurations are read, and their layers."""
