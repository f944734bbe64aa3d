"""Sweeps over settings of a recipe."""
