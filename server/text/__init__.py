"""From text to tokens and back, and what an answer's text says."""
