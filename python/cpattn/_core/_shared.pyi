# What the stubs of all rooms share.
from typing import Any, type_check_only

from typing_extensions import Self

from .._types import IndexTable as _Table
from .._types import Indices as _OneDimension

_Indices = _OneDimension | _Table

@type_check_only
class _pybind11_type(type): ...

@type_check_only
class _Bound(metaclass=_pybind11_type):  # made by functions of the core only
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

@type_check_only
class _Value(_Bound):  # that nothing can change
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...  # of cpattn._values
    def _state(self) -> tuple[Any, ...]: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, memo: Any, /) -> Self: ...
