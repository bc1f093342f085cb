"""The report page of one run, or of several beside each other."""
