"""What is minimised. An objective turns token losses into the number that backward starts from."""
