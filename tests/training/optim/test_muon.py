"""Muon makes torch's steps, in bf16 to its rounding and in fp32 by the book."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, Final, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.support import pretend_bf16
from training.optim.muon import Muon, orthogonal
from training.system.precision import PrecisionName, product_dtype

# Square, wide, tall, and of a single row and column.
SHAPES: Final = [(24, 24), (24, 40), (40, 24), (1, 7), (7, 1)]
COEFFICIENTS: Final = (3.4445, -4.775, 2.0315)
BOTH: Final = pytest.mark.parametrize("has_bf16", [False, True], ids=["fp32", "bf16"])


def random(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_matrices() -> list[nn.Parameter]:
    return [nn.Parameter(random(shape, seed)) for seed, shape in enumerate(SHAPES)]


def torch_s(matrices: Sequence[nn.Parameter], **changes: Any) -> Optimizer:
    """The optimizer that ours follows."""
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
    return torch.optim.Muon(matrices, **{**options, **changes})


def ours(matrices: Sequence[nn.Parameter]) -> Muon:
    return Muon(matrices, lr=0.02, weight_decay=0.3)


def train(optimizer: Optimizer, steps: Sequence[int]) -> None:
    """The steps of these numbers; sizes of gradients and rates differ from step to step."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
            for number, parameter in enumerate(group["params"]):
                parameter.grad = random(parameter.shape, 100 * step + number) * 10.0 ** (step - 2)
        optimizer.step()


def zeroth_power(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return orthogonal(matrix, coefficients=COEFFICIENTS, num_rounds=5, eps=1e-7, dtype=dtype)


def by_svd(matrix: Tensor) -> Tensor:
    """The same from the singular values themselves, in double precision."""
    a, b, c = COEFFICIENTS
    left_vectors, values, right_vectors = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    result: Tensor = (left_vectors * values) @ right_vectors
    return result


class ProductTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the types of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.add(result.dtype)
        return result


@BOTH
def test_products_are_of_the_device_s_precision(
    has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bf16(monkeypatch, has_bf16)
    matrices = make_matrices()
    with ProductTypes() as products:
        train(ours(matrices), range(1))
    assert products.dtypes == {torch.bfloat16 if has_bf16 else torch.float32}
    assert {matrix.dtype for matrix in matrices} == {torch.float32}


@pytest.mark.parametrize(
    ("has_bf16", "rounding"),
    [pytest.param(True, 2**-8, id="bf16"), pytest.param(False, 0.03, id="fp32")],
)
def test_steps_are_torch_s(
    has_bf16: bool, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a rounding of the way; in fp32 up to the several that torch's bf16 adds up."""
    pretend_bf16(monkeypatch, has_bf16)
    first, mine, theirs = make_matrices(), make_matrices(), make_matrices()
    train(ours(mine), range(5))
    train(torch_s(theirs), range(5))
    for start, one, other in zip(first, mine, theirs, strict=True):
        assert (one - other).norm() < rounding * (other - start).norm(), one.shape


@pytest.mark.parametrize("name", get_args(PrecisionName))
def test_products_are_of_the_precision_asked_for(name: PrecisionName) -> None:
    dtype, matrices = product_dtype(torch.device("cpu"), name), make_matrices()
    with ProductTypes() as seen:
        train(Muon(matrices, precision=name), range(1))
    assert seen.dtypes == {dtype}


@BOTH
def test_steps_are_the_same_to_the_bit_each_time(
    has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bf16(monkeypatch, has_bf16)
    one, other = make_matrices(), make_matrices()
    for matrices in (one, other):
        train(ours(matrices), range(3))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("shape", [*SHAPES, (96, 384)])
def test_singular_vectors_stay_and_values_come_near_one(shape: tuple[int, int]) -> None:
    got = zeroth_power(random(shape, 0))
    torch.testing.assert_close(got.double(), by_svd(random(shape, 0)), rtol=0, atol=1e-5)
    values = torch.linalg.svdvals(got)
    assert values.min() > 0.65
    assert values.max() < 1.2


def test_an_orthogonal_matrix_is_only_scaled() -> None:
    orthonormal, _ = torch.linalg.qr(random((24, 24), 0))
    got = zeroth_power(orthonormal)
    scale = got.norm() / orthonormal.norm()
    torch.testing.assert_close(got, scale * orthonormal, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (1, 7)])
def test_neither_size_nor_sign_nor_side_matters(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """To the bit, where the size differs by a power of two; what is given stays as it is."""
    matrix = random(shape, 0)
    expected = zeroth_power(matrix, dtype)
    assert expected.dtype == dtype
    assert torch.equal(zeroth_power(-8 * matrix, dtype), -expected)
    assert torch.equal(zeroth_power(matrix.T, dtype), expected.T)
    assert torch.equal(matrix, random(shape, 0))


@BOTH
def test_a_gradient_of_zero_only_decays(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_bf16(monkeypatch, has_bf16)
    matrix = nn.Parameter(torch.ones(2, 3))
    matrix.grad = torch.zeros(2, 3)
    Muon([matrix], lr=0.5, weight_decay=0.5).step()
    assert torch.equal(matrix, torch.full((2, 3), 0.75))


def test_a_first_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a diagonal gradient: each value of it is a singular value."""
    pretend_bf16(monkeypatch, False)
    matrix = nn.Parameter(torch.zeros(2, 2))
    matrix.grad = torch.diag(torch.tensor([3.0, -4.0]))
    Muon([matrix], lr=0.1).step()
    a, b, c = COEFFICIENTS
    values = [0.6, -0.8]
    for _ in range(5):
        values = [a * s + b * s**3 + c * s**5 for s in values]
    expected = torch.diag(torch.tensor(values)) * -0.1 * 0.2 * math.sqrt(2)
    torch.testing.assert_close(matrix.detach(), expected, rtol=1e-5, atol=1e-8)


def through_a_file(optimizer: Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@BOTH
def test_a_state_that_comes_back_steps_the_same(
    has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bf16(monkeypatch, has_bf16)
    whole, parted = make_matrices(), make_matrices()
    train(ours(whole), range(4))
    first, second = ours(parted), Muon(parted, lr=9.0)
    train(first, range(2))
    second.load_state_dict(through_a_file(first))
    train(second, range(2, 4))
    assert all(torch.equal(x, y) for x, y in zip(whole, parted, strict=True))


@pytest.mark.parametrize("is_torch_s_first", [True, False])
def test_a_run_goes_on_between_torch_s_and_this_one(
    is_torch_s_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum and settings come along, in either direction."""
    pretend_bf16(monkeypatch, True)
    start, whole, parted = make_matrices(), make_matrices(), make_matrices()
    train(torch_s(whole), range(4))
    makers = (torch_s, ours) if is_torch_s_first else (ours, torch_s)
    first, second = (make(parted) for make in makers)
    train(first, range(2))
    state = through_a_file(first)
    assert {key for each in state["state"].values() for key in each} == {"momentum_buffer"}
    second.load_state_dict(state)
    train(second, range(2, 4))
    for begin, one, other in zip(start, parted, whole, strict=True):
        assert (one - other).norm() < 2**-8 * (other - begin).norm(), one.shape


def test_a_parameter_without_gradient_stays_and_the_closures_loss_is_returned() -> None:
    moved, still = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer = Muon([moved, still])

    def closure() -> float:
        loss = moved.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == 6.0
    assert not torch.equal(moved, torch.ones(2, 3))
    assert torch.equal(still, torch.ones(2, 3))
    assert list(optimizer.state) == [moved]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "Learning rate should be >= 0 but is: -0.1"),
        ({"lr": math.nan}, "Learning rate should be >= 0 but is: nan"),
        ({"weight_decay": -1.0}, "weight decay should be >= 0 but is: -1.0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(make_matrices(), **settings)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_only_matrices_are_taken(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="only supports 2D parameters"):
        Muon([nn.Parameter(torch.zeros(shape))])


@pytest.mark.parametrize("grad", [torch.eye(3).to_sparse(), torch.eye(3, dtype=torch.complex64)])
def test_only_dense_real_gradients_are_taken(grad: Tensor) -> None:
    matrix = nn.Parameter(torch.zeros(3, 3, dtype=grad.dtype))
    matrix.grad = grad
    with pytest.raises(RuntimeError, match="give it dense real ones"):
        Muon([matrix]).step()
    assert not matrix.detach().any()


@pytest.mark.parametrize(
    "changes", [{"nesterov": False}, {"adjust_lr_fn": None}, {"adjust_lr_fn": "original"}]
)
def test_a_state_of_other_steps_is_refused(changes: dict[str, Any]) -> None:
    matrices = make_matrices()
    optimizer = ours(matrices)
    optimizer.load_state_dict(torch_s(make_matrices(), **changes).state_dict())
    with pytest.raises(ValueError, match=r"or take torch\.optim\.Muon"):
        train(optimizer, range(1))
    assert all(torch.equal(x, y) for x, y in zip(matrices, make_matrices(), strict=True))
