"""Differentiable ops of layers with states, with their collectives."""
