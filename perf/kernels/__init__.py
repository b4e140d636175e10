"""The GPU kernels without a GPU: values in an interpreter, and what each variant takes when compiled."""
