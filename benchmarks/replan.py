"""How long a new batch size holds up training: the recorded step and the plan, beside a plain step.

    python benchmarks/replan.py [MODEL ...]

Each of a few batch sizes is new to a limited model (tiny sizes, half of what the plain step makes): its first step is
recorded, and before its second one it is planned. Process time, which waits for nobody.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import scrimp
from models import MODELS
from scrimp.testing import live_bytes


def seconds(step: Callable[[], object]) -> float:
    """Return the process time that a step takes."""
    start = time.process_time()
    step()
    return time.process_time() - start


def judge(name: str) -> None:
    """Print a line for each batch size."""
    model, make_batch = MODELS[name](tiny=True, device="cpu")
    batch = make_batch()

    def step(size: int) -> None:
        model(*(part[:size] for part in batch)).backward()
        clear(model)

    step(len(batch[0]))
    with live_bytes() as count:
        step(len(batch[0]))
    sizes = range(len(batch[0]), 0, -1)
    plain = {size: min(seconds(partial(step, size)) for _ in range(5)) for size in sizes}
    session = scrimp.limit(model, activations=count.peak // 2)
    for size in sizes:
        recorded = seconds(partial(step, size))
        planning = seconds(lambda: session.plan)
        assert session.trace is not None
        print(
            f"{name:10} batch {size}: {len(session.trace.ops):5} operators, plain {plain[size] * 1e3:6.1f} ms, "
            f"recorded {recorded * 1e3:7.1f} ms, planned in {planning * 1e3:7.1f} ms"
        )
    session.detach()


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["gpt2", "llama", "resnet50", "unet", "t5"])
    torch.set_num_threads(1)
    for name in parser.parse_args().models:
        judge(name)


if __name__ == "__main__":
    main()
