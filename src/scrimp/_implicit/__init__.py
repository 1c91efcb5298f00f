"""Solutions of equations as differentiable functions of what the equations depend on."""
