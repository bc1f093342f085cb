"""The wing of preferences: objectives that compare or judge answers, and their data."""
