"""Compiles the GPU kernels without a GPU, and reports the resources of each variant."""
