"""Frozen weights in fewer bytes: how they are encoded, cut and decoded. Products with them are in engine.ops."""
