"""CUDA graphs: what of a training step is recorded once and replayed from then on."""
