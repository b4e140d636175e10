"""The GPU kernels without a GPU: what each variant takes when compiled."""
