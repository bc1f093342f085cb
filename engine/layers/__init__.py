"""Parameters plus a short forward. Layers receive sizes, an axis and a plan; never the run's configuration."""
