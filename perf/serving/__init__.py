"""Load tests of an OpenAI-compatible server over HTTP, measuring the latencies that users would see."""
