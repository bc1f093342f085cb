"""What rankfold generate is made of."""
