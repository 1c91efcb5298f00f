"""scrimp: a PyTorch training step that fits in the bytes you state, with bit-identical gradients."""

__version__ = "0.1.0"

__all__ = ["__version__"]
