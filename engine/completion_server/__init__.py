"""Completions from a server that somebody else runs, vLLM's or SGLang's, over HTTP. Knows no tensors."""
