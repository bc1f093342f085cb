"""Arithmetic on tensors, below autograd and collectives: the plain-torch specification of every op, and the records
that every backend takes. Imports torch and nothing of the engine."""
