"""Completions from a server of the user's, vLLM's or SGLang's, over HTTP. Knows no tensors."""
