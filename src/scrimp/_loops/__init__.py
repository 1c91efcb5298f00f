"""Long loops: which states are kept, and how the others come back."""
