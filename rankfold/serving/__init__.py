"""A server of the Tinker protocol: clients train and sample adapters on one base; see README.md."""
