"""Plain PyTorch Transformers that know nothing of meshes."""
