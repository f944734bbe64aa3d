"""Trained runs as files that run without peerbayes: ONNX, torch.export, and repositories of the Hugging Face hub."""
