"""What tools/generate.py is made of."""
