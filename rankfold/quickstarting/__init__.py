"""The quickstart: its steps, the text that it trains on, and the comparison that ends it."""
