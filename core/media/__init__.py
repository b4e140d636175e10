"""Images: decoded, prepared as the model's own processor does, and encoded by transformers' own module."""
