"""The training loop: stages, validation, reporters, learners side by side."""
