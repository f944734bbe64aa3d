"""Stochastic weight sharing: figures of size and confidence."""
