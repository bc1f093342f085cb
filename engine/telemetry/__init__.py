"""A run's output: errors, log lines, progress, metrics. Imports torch only for TensorBoard, and only when asked."""
