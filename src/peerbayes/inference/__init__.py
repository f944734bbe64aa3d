"""Many draws into one prediction."""
