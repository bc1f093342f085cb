"""What a run needs and how long a step takes, on paper: arithmetic on sizes, without weights, processes or a device."""
