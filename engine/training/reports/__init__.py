"""Reports of a run: its steps, a summary, a memory forecast, metrics, phases of steps, traces."""
