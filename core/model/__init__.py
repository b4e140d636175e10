"""The model: a checkpoint's configuration and weights, the decoder, LoRA state, the sampler."""
