"""Models that transformers defines and the engine has no family for: transformers' own modules, trained as our own."""
