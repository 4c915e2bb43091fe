"""The OpenAI-compatible HTTP API of a cluster: validation, text, streaming, usage and metrics."""
