"""Backward passes over the graph that PyTorch recorded: orders, observers, and parallel branches."""
