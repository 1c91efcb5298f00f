"""Traces of steps that never run."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import scrimp
from models import MODELS
from scrimp._simulate import simulate
from scrimp.errors import TraceError, TraceWarning
from scrimp.planning import MACHINES, Machine

CPU = MACHINES["CPU"]
GIB = 1 << 30


class Perceptron(nn.Module):
    """Two layers and a loss, with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a scalar."""
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1)).square().mean()


def described(width: int = 64, rows: int = 32) -> tuple[nn.Module, Tensor]:
    """The perceptron and its input on the meta device."""
    with torch.device("meta"):
        return Perceptron(width), torch.empty(rows, width)


@pytest.mark.parametrize("name", ["llama", "resnet50", "unet", "vit_l"])
def test_peak_is_about_that_of_the_real_step(name: str) -> None:
    """What is followed without data takes within a tenth of what the step measures on the CPU, which fuses less."""
    module, make_batch = MODELS[name](tiny=True)
    real = simulate(scrimp.trace(module, *make_batch()))
    before = int(real.levels[0])
    module, make_batch = MODELS[name](tiny=True, device="meta")
    seen = scrimp.trace_on(CPU, module, *make_batch())
    activations = simulate(seen).peak - sum(part.nbytes for part in seen.resident)
    assert activations == pytest.approx(real.peak - before, rel=0.15)


def test_nothing_is_allocated_for_a_model_of_a_terabyte() -> None:
    """A step far beyond this machine is planned within a budget."""
    module, x = described(width=1 << 17, rows=1 << 20)
    seen = scrimp.trace_on("H200", module, x)
    plain = simulate(seen).peak
    assert plain > 1 << 40
    made = scrimp.plan(seen, int(plain * 0.9))
    assert made.peak <= plain * 0.9


def test_real_fake_and_described_modules_give_the_same_trace() -> None:
    """Only shapes, dtypes and strides are looked at."""
    module, x = described()
    with FakeTensorMode():
        fake, fake_x = Perceptron(), torch.empty(32, 64)
    expected = scrimp.trace_on("H200", module, x)
    assert scrimp.trace_on("H200", Perceptron(), torch.empty(32, 64)) == expected
    assert scrimp.trace_on("H200", fake, fake_x) == expected


def test_random_operators_can_be_dropped() -> None:
    """What is only described counts as repeatable: a machine that runs it draws again."""
    module, x = described()
    seen = scrimp.trace_on("H200", module, x)
    assert all(op.replayable for op in seen.ops if "dropout" in op.name)
    assert any("dropout" in op.name for op in seen.ops)


def test_modules_are_named() -> None:
    """Operators carry the path of the module that called them."""
    module, x = described()
    assert {"up", "down"} <= {op.module for op in scrimp.trace_on("H200", module, x).ops}


def test_attention_is_fused() -> None:
    """As on a GPU, the matrix of scores is never there, with or without a mask."""

    def step(x: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None).float().mean()

    for dtype, masked in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
        x = torch.empty(1, 2, 2048, 64, dtype=dtype, device="meta", requires_grad=True)
        mask = torch.empty(2048, 2048, dtype=torch.bool, device="meta") if masked else None
        seen = scrimp.trace_on("H200", step, x, mask)
        scores = 2 * 2048 * 2048 * x.element_size()
        makers = {op.name for op in seen.ops}
        assert {name for name in makers if "attention" in name}
        assert simulate(seen).peak < (6 if masked else 1) * scores


def test_a_faster_machine_takes_less_time() -> None:
    """Times come from the machine; bytes do not."""
    module, x = described(1024, 4096)
    fast, slow = scrimp.trace_on("H200", module, x), scrimp.trace_on("T4", module, x)
    assert simulate(fast).seconds < simulate(slow).seconds
    assert fast.fingerprint() == slow.fingerprint()


def test_seconds_follow_the_roofline() -> None:
    """A large product is bound by arithmetic, an addition by bandwidth, a small one by its launch."""
    on = Machine("made up", 80 * GIB, bandwidth=1e12, flops={32: 1e12}, launch=1e-6)

    def step(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b + a).sum()

    large, small = (torch.empty(n, n, device="meta", requires_grad=True) for n in (4096, 2))
    product, addition = scrimp.trace_on(on, step, large, large).ops[:2]
    assert product.seconds == pytest.approx(2 * 4096**3 / 1e12 + 1e-6)
    assert addition.seconds == pytest.approx(3 * 4 * 4096**2 / 1e12 + 1e-6)
    assert scrimp.trace_on(on, step, small, small).ops[0].seconds == pytest.approx(1e-6, rel=1e-3)


def test_shapes_that_depend_on_data_are_refused() -> None:
    """Nobody can say how many rows will be picked."""
    x = torch.empty(8, 8, device="meta", requires_grad=True)
    with pytest.raises(TraceError, match="without data"):
        scrimp.trace_on("H200", lambda x: x[x.sum(1) > 0].sum(), x)


def test_a_question_to_data_is_answered_yes_and_said() -> None:
    """Checks that all is well come out well, with a warning."""
    x = torch.empty(8, 8, device="meta", requires_grad=True)
    with pytest.warns(TraceWarning, match="1 yes-or-no"):
        seen = scrimp.trace_on("H200", lambda x: x.exp().sum() if x.isfinite().all() else x.sum(), x)
    assert "aten.exp.default" in {op.name for op in seen.ops}


def test_a_step_without_a_loss_is_refused() -> None:
    """As by scrimp.trace."""
    with pytest.raises(TraceError, match="need a loss"):
        scrimp.trace_on("H200", lambda x: x.sin(), torch.empty(8, 8, device="meta", requires_grad=True))


def test_an_unknown_machine_is_refused() -> None:
    """The error names those that are known."""
    with pytest.raises(TraceError, match="H200"):
        scrimp.trace_on("abacus", lambda x: x.sum(), torch.empty(1, device="meta", requires_grad=True))


def test_trace_says_what_to_do_with_described_tensors() -> None:
    """A step without data cannot be run."""
    module, x = described()
    with pytest.raises(TraceError, match="trace_on"):
        scrimp.trace(module, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("deq", "lstm", "mamba")])
def test_real_sizes_can_be_planned_without_a_gpu(name: str) -> None:
    """Every model of the set whose shapes are known is planned for half of its activations, or told the least."""
    module, make_batch = MODELS[name](tiny=False, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        seen = scrimp.trace_on("H200", module, *make_batch())
    before = sum(part.nbytes for part in seen.resident)
    budget = before + (simulate(seen).peak - before) * 3 // 4
    assert scrimp.plan(seen, budget).peak <= budget


def test_a_machine_has_a_link() -> None:
    """A trace for a GPU can be planned with host memory; the CPU's memory is the host's."""
    module, x = Perceptron(), torch.empty(32, 64)
    links = [scrimp.trace_on(name, module, x).out_bandwidth for name in ("H200", "T4", "CPU")]
    assert links[0] > links[1] > links[2] == 0


def test_an_rms_norm_is_one_operator() -> None:
    """It saves its input as it is, and numbers for each row, as a GPU's kernel does, and is not spelled out."""
    norm = nn.RMSNorm(64, device="meta", dtype=torch.bfloat16)
    x = torch.empty(32, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    seen = scrimp.trace_on("H200", lambda x: norm(x * 2).sum(), x)
    saved = [seen.values[value].nbytes for op in seen.ops for value in op.saves if seen.values[value].op is not None]
    assert sum(nbytes for nbytes in saved if nbytes >= x.nbytes) == x.nbytes
    assert [op.name for op in seen.ops][:3] == ["aten.mul.Tensor", "aten.native_layer_norm.default", "aten.sum.default"]


_DEEP = """
import threading, torch, scrimp

def forward(x):
    for _ in range(4000):
        x = x.tanh()
    return x.sum()

def step():
    print(len(scrimp.trace_on("H200", forward, torch.empty(64, device="meta", requires_grad=True)).ops))

threading.stack_size(512 << 10)
thread = threading.Thread(target=step)
thread.start()
thread.join()
"""


def test_a_long_chain_does_not_overflow_the_stack() -> None:
    """A graph many times deeper than the stack is large goes node by node when it was traced."""
    run = subprocess.run([sys.executable, "-c", _DEEP], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["4002"]
