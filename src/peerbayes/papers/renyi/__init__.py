"""Rényi mutual learning: figures over alphas."""
