"""Teachers: models whose log-probabilities of sampled tokens a run learns from."""
