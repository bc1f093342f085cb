"""What a run says and records of itself: a summary, a forecast, figures, parts of steps, traces."""
