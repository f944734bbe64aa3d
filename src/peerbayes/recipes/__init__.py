"""Recipes: data, peers, stages and evaluation, in one TOML file."""
