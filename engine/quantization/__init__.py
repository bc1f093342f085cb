"""Quantized frozen weights: how they are encoded, cut and decoded. Products with them are in engine.ops."""
