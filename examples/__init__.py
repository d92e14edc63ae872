"""Example models and a training script."""
