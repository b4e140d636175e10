"""Files of checkpoints: safetensors, GGUF, and the forms of quantised weights in them."""
