"""Records what would make a program wait for a CUDA device, while it runs on a CPU.

On a device every value that the host reads, and every tensor made of host values, is a copy that
waits for all the device was given before. Here they cost nothing, so only a record shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_P = ParamSpec("_P")
_R = TypeVar("_R")

_READS = {
    "__array__",
    "__bool__",
    "__complex__",
    "__contains__",
    "__float__",
    "__format__",
    "__index__",
    "__int__",
    "__repr__",
    "allclose",
    "cpu",
    "cuda",
    "equal",
    "is_nonzero",
    "item",
    "numpy",
    "tolist",
}
# Their result's shape depends on values. Without a size, `repeat_interleave` adds up its counts.
_SHAPED_BY_VALUES = {
    "argwhere",
    "bincount",
    "masked_scatter",
    "masked_select",
    "multinomial",
    "nonzero",
    "unique",
    "unique_consecutive",
}
_MADE_OF_HOST_VALUES = {"as_tensor", "asarray", "from_numpy", "frombuffer", "new_tensor", "tensor"}
# The same inside torch, where no Python function is seen to call them.
_OPERATORS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")


class SyncRecorder:
    """While open, notes the name of every such call.

    What runs inside a function that `expecting` wraps is left out and counted instead.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_expected = 0
        self._is_expecting = False
        self._open = ExitStack()

    def __enter__(self) -> SyncRecorder:
        patch = self._open.enter_context(pytest.MonkeyPatch.context())
        for name in ("from_numpy", "frombuffer"):  # which tell no mode about themselves
            patch.setattr(torch, name, self._noting(name, getattr(torch, name)))
        self._open.enter_context(_Functions(self))
        self._open.enter_context(_Operators(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def expecting(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """The function, allowed to copy and to wait."""

        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            self.num_expected += 1
            with self._expected():
                return function(*args, **kwargs)

        return call

    def note(self, name: str) -> None:
        if not self._is_expecting:
            self.calls.append(name)

    @contextmanager
    def _expected(self) -> Iterator[None]:
        before, self._is_expecting = self._is_expecting, True
        try:
            yield
        finally:
            self._is_expecting = before

    def _noting(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            self.note(name)
            return function(*args, **kwargs)

        return call


class _Functions(TorchFunctionMode):
    """Sees what Python code calls."""

    def __init__(self, recorder: SyncRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _waits(name, args, kwargs):
            self._recorder.note(name)
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what torch itself calls, whatever the Python function was."""

    def __init__(self, recorder: SyncRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.name().partition(".")[0] in _OPERATORS:
            self._recorder.note(func.name())
        return func(*args, **(kwargs or {}))


def _waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call on tensors of a CUDA device would wait for it."""
    if name in _READS | _SHAPED_BY_VALUES | _MADE_OF_HOST_VALUES:
        return True
    if name == "to":
        return any(
            isinstance(value, str | torch.device) for value in (*args[1:], kwargs.get("device"))
        )
    if name in ("__getitem__", "__setitem__"):
        return _is_indexed_by_values(args[1]) or (name == "__setitem__" and _holds_tensor(args[1]))
    if name == "where":  # a number becomes a tensor of the host, which is then copied
        return len(args) < 3 or not all(isinstance(value, Tensor) for value in args)
    if name in ("index_put", "index_put_"):  # adding up checks the range of its indices
        return bool(kwargs.get("accumulate", len(args) > 3 and args[3]))
    return name == "repeat_interleave" and kwargs.get("output_size") is None


def _is_indexed_by_values(index: Any) -> bool:
    """True of masks, whose ones are counted, and of lists, which become tensors of the host."""
    if isinstance(index, Tensor):
        return index.dtype in (torch.bool, torch.uint8)
    if isinstance(index, tuple):
        return any(_is_indexed_by_values(part) for part in index)
    return isinstance(index, list)


def _holds_tensor(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) for part in parts)
