"""Layers that carry a state along each document: gated delta nets, state spaces and short convolutions."""
