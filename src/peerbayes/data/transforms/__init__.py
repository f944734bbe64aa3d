"""Images changed on their own device: augmentation, perturbation, corruption."""
