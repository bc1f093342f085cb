"""Commands of rankfold plan, one module each."""
