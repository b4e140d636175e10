"""Parts of `LLM`, the library: the API's requests, without HTTP."""
