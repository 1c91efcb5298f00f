"""How the derivative of a fixed point, a root or a minimum is found."""

from ._implicit.adjoints import Adjoint, Implicit, JacobianFree, Phantom, Reversible, Unroll

__all__ = ["Adjoint", "Implicit", "JacobianFree", "Phantom", "Reversible", "Unroll"]
