"""`rankfold distill`: records with a teacher's most likely tokens."""
