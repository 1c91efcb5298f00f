"""Is the peak within the budget, from the first step on, for every model and ten budgets? And are the bits the same?

    python benchmarks/budgets.py [--device cuda] [--budgets 10] [--steps 4] [MODEL ...]

Budgets go from the peak of the plain step down to the smallest one that the errors lead to. On a GPU the process is
not allowed more memory than the budget, so that nothing can be hidden; on the CPU the live storages are counted.
"""

import argparse
import gc
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

import scrimp
from models import MODELS
from scrimp.testing import live_bytes


class Run:
    """A few training steps of a model: peak bytes, seconds and the parameters that come out."""

    def __init__(self, name: str, tiny: bool, device: torch.device, steps: int, budget: int | None) -> None:
        gc.collect()
        model, make_batch = MODELS[name](tiny=tiny, device=device)
        self.peak = self.worst_step = 0
        self.seconds: list[float] = []
        self.session = None if budget is None else scrimp.limit(model, budget)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(1.0 if budget is None else min(1.0, budget / total), device)
        torch.manual_seed(0)
        try:
            for seed in range(steps):
                self.step(model, make_batch(seed), device)
            self.parameters = [parameter.detach().cpu() for parameter in model.parameters()]
            if self.session is not None:
                self.trace, self.plan = self.session.trace, self.session.plan
        finally:
            if self.session is not None:
                self.session.detach()
            if device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0, device)

    def step(self, model: torch.nn.Module, batch: tuple[torch.Tensor, ...], device: torch.device) -> None:
        """Run one step; plain stochastic gradient descent, so that the optimizer needs nothing of its own."""
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            model(*batch).backward()
            torch.cuda.synchronize(device)
            self.seconds.append(time.perf_counter() - start)
            peak = torch.cuda.max_memory_allocated(device)
        else:
            there = (*model.parameters(), *batch, *model.buffers())
            resident = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}.values())
            with live_bytes() as count:
                start = time.perf_counter()
                model(*batch).backward()
                self.seconds.append(time.perf_counter() - start)
                if self.session is not None:
                    _ = self.session.plan
            peak = resident + count.peak
        self.peak = max(self.peak, peak)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-3)
                    parameter.grad = None


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def smallest_budget(name: str, tiny: bool, device: torch.device, steps: int, resident: int) -> tuple[int, list[int]]:
    """Follow what the errors name, from a budget that nothing can meet, to one that works."""
    budget, named = resident + 1, []
    while True:
        try:
            Run(name, tiny, device, steps, budget)
        except scrimp.BudgetError as error:
            named.append(error.smallest)
            print(f"  refused {budget / 2**20:.0f} MiB, named {error.smallest / 2**20:.0f} MiB", flush=True)
            budget = max(error.smallest, int(budget * 1.01))
        else:
            return budget, named


def judge(name: str, tiny: bool, device: torch.device, budgets: int, steps: int) -> bool:
    """Print a row for each budget; True if all is well."""
    plain = Run(name, tiny, device, steps, None)
    again = Run(name, tiny, device, steps, None)
    exact = same(plain.parameters, again.parameters)
    probe = Run(name, tiny, device, 2, plain.peak * 2)
    resident = sum(part.nbytes for part in probe.trace.resident)
    low, refused = smallest_budget(name, tiny, device, steps, resident)
    unit, label = (2**30, "GiB") if not tiny else (2**20, "MiB")
    plain_ms = min(plain.seconds[1:]) * 1e3
    print(
        f"\n{name}: plain {plain.peak / unit:.2f} {label}, {plain_ms:.1f} ms, resident {resident / unit:.2f}, "
        f"{len(probe.trace.ops)} operators, plain steps {'repeat' if exact else 'DO NOT repeat'}; smallest budget "
        f"{low / unit:.3f}, after errors that named {[f'{named / unit:.3f}' for named in refused]}",
        flush=True,
    )
    fine = True
    for number in range(budgets):
        budget = round(plain.peak * (low / plain.peak) ** (number / max(budgets - 1, 1)))
        try:
            run = Run(name, tiny, device, steps, budget)
        except (scrimp.BudgetError, torch.OutOfMemoryError) as error:
            print(
                f"  {budget / unit:8.3f} {label}  {type(error).__name__}: {str(error).splitlines()[0]:.150}", flush=True
            )
            fine = False
            continue
        predicted = run.plan.seconds / run.plan.plain_seconds - 1 if run.plan else float("nan")
        within, bits = run.peak <= budget, same(run.parameters, plain.parameters) or not exact
        fine = fine and within and bits
        ms = min(run.seconds[5:], default=float("nan")) * 1e3  # by then all is looked up, measured and planned
        print(
            f"  {budget / unit:8.3f} {label}  peak {run.peak / unit:8.3f} {'ok  ' if within else 'OVER'} "
            f"{'same bits' if bits else 'OTHER BITS'}  first {run.seconds[0] * 1e3:8.1f} ms, then {ms:8.1f} "
            f"({ms / plain_ms - 1:+.1%}; predicted {predicted:+.1%})",
            flush=True,
        )
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device(options.device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass gives other bits each time
    torch.utils.deterministic.fill_uninitialized_memory = False
    bad = [
        name
        for name in options.models
        if not judge(name, options.tiny or device.type == "cpu", device, options.budgets, options.steps)
    ]
    print(
        f"\n{len(options.models) - len(bad)} of {len(options.models)} models within every budget; not: {bad or 'none'}"
    )


if __name__ == "__main__":
    main()
