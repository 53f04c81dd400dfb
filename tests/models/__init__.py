"""Models of Hugging Face transformers, unmodified: on plain tensors, and on a mesh."""
