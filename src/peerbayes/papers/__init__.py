"""What belongs to one paper alone: its recipes and its figures."""
