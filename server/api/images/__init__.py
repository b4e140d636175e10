"""Images of requests: parts of messages, downloads, and what is prepared for the encoder."""
