"""CUDA graphs: the parts of a training step that are captured once and replayed from then on."""
