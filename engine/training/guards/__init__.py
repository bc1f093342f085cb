"""The guards of a run: live adapters, equal replicas, spikes, and where numbers stopped being finite."""
