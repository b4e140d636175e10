"""Calls of the native library: a decoder's step, states, files, LoRA offload. Its source is `ops/native`."""
