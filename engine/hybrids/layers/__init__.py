"""Mixers with states, and the attention beside them."""
