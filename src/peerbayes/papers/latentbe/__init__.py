"""Ensemble distillation through averaged members: figures of students and perturbations."""
