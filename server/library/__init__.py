"""Parts of `LLM`, the library: the same calls as over HTTP, without HTTP."""
