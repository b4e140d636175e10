"""Where the time of an engine's steps goes: kernels, gaps and floors."""
