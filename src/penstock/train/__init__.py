"""What a training loop touches."""
