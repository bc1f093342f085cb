"""Makes the documentation's site: its pages from docs/, the repository's other pages, and the code."""
