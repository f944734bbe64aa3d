"""Sweeps over the settings of a recipe."""
