"""Adapters and weights of experts, in and out."""
