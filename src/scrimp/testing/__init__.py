"""Helpers that judge exactness and count memory: for scrimp's own tests, and for your models.

`assert_same_step` runs a training step plainly and under scrimp and compares everything that it left behind,
bit by bit. `assert_same_tensor` is the comparison it uses, and `live_bytes` counts what is alive on the CPU.
"""

from scrimp.testing._bits import assert_same_tensor
from scrimp.testing._live_bytes import LiveBytes, live_bytes
from scrimp.testing._step import NondeterministicStepError, Step, assert_same_outcome, assert_same_step

__all__ = [
    "LiveBytes",
    "NondeterministicStepError",
    "Step",
    "assert_same_outcome",
    "assert_same_step",
    "assert_same_tensor",
    "live_bytes",
]
