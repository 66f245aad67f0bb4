"""Tensors without data, and what happens to every PyTorch call that meets one.

Knows PyTorch's dispatcher and `__torch_function__`. Must not know the plan's form. Two layers: the dispatch layer is
complete (every operator of every route arrives there: methods, operators, `torch.ops`, scripted code) and decides
between view, allocation, fill, work on real data and refusal; the function layer above it only smooths what would fail
before it gets there on a machine without a GPU (`.cuda()`, `device="cuda"`) and what reads memory directly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from kernelfleet_ext import _session
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kernelfleet_recorder.refusal import BRANCH, COPY, READS, Refusal, hint_for
from kernelfleet_recorder.session import Session, Store, pattern

_PYTHON_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)

ALLOCATIONS = frozenset("empty empty_strided empty_permuted new_empty new_empty_strided empty_like".split())
FILLED: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    "zeros": lambda args, kwargs: 0,
    "zeros_like": lambda args, kwargs: 0,
    "new_zeros": lambda args, kwargs: 0,
    "_efficientzerotensor": lambda args, kwargs: 0,
    "ones": lambda args, kwargs: 1,
    "ones_like": lambda args, kwargs: 1,
    "new_ones": lambda args, kwargs: 1,
    "full": lambda args, kwargs: kwargs["fill_value"] if "fill_value" in kwargs else args[1],
    "full_like": lambda args, kwargs: kwargs["fill_value"] if "fill_value" in kwargs else args[1],
    "new_full": lambda args, kwargs: kwargs["fill_value"] if "fill_value" in kwargs else args[2],
}
RANDOM_LIKE = frozenset("rand_like randn_like randint_like".split())
NO_DRIVER = (
    "NVIDIA driver",
    "CUDA error",
    "CUDA driver",
    "Torch not compiled with CUDA",
    "No CUDA GPUs",
    "from the 'CPU' backend",
)
NO_MEMORY_BEHIND = (
    "data pointer",
    "tensor subclasses",
    "unallocated storage",
    "invalid python storage",
    "has no storage",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it PyTorch works as if nothing was recorded; only plain tensors may be touched."""
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_PYTHON_KEYS):
        yield


class RecordedTensor(torch.Tensor):
    """A tensor of the candidate: geometry and type of its own, content in a `Store` that may have no data."""

    _store: Store

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(_active(), func, args, kwargs or {})


def _active() -> Session:
    session = _session.active()
    if not isinstance(session, Session):
        raise RuntimeError("a recorded tensor outlived its recording")
    return session


def wrap(session: Session, store: Store, like: torch.Tensor) -> RecordedTensor:
    """A tensor with the geometry and type of `like` (plain or meta) on `store`."""
    tensor: RecordedTensor = torch.Tensor._make_wrapper_subclass(
        RecordedTensor,
        like.size(),
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=session.torch_device,
    )
    tensor._store = store
    return tensor


def data_less(session: Session, kind: str, name: Any, shape: Any, strides: Any, dtype: torch.dtype, size: int) -> Any:
    """A new tensor on a new store of `size` bytes: an input, say."""
    with quiet():
        store = Store(session, kind, size, name)
        return wrap(session, store, _geometry(store, shape, strides, 0, dtype))


def from_bytes(session: Session, kind: str, name: Any, shape: Any, strides: Any, dtype: torch.dtype, raw: Any) -> Any:
    """A tensor whose bytes are `raw` (a writable buffer, used in place)."""
    with quiet():
        size = len(raw)
        store = Store(session, kind, size, name)
        flat = torch.frombuffer(raw, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
        store.storage = flat.untyped_storage()
        return wrap(session, store, _geometry(store, shape, strides, 0, dtype))


def _geometry(store: Store, shape: Any, strides: Any, offset: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="meta").set_(store.meta, int(offset), tuple(shape), tuple(strides))


def store_of(session: Session, tensor: torch.Tensor) -> Store | None:
    """The store of a tensor; a plain CPU tensor (from NumPy, say) is adopted as real. `None` for anything else."""
    if isinstance(tensor, RecordedTensor):
        return tensor._store
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    with quiet():
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
        known = session.adopted.get(storage._cdata)
        if known is not None:
            return known[1]
        store = Store(session, "real", storage.nbytes())
        store.storage = storage
        # The storage stays alive with its entry, even when the store is given other bytes: its address is the key.
        session.adopted[storage._cdata] = (storage, store)
        return store


def _meta(store: Store, tensor: torch.Tensor) -> torch.Tensor:
    return _geometry(store, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)


def _real(store: Store, tensor: torch.Tensor, write: bool) -> torch.Tensor:
    if not isinstance(tensor, RecordedTensor):
        if write:
            store.data(write=True)
        return tensor
    plain = torch.empty(0, dtype=tensor.dtype)
    return plain.set_(store.data(write), tensor.storage_offset(), tensor.size(), tensor.stride())


def _map(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    return pytree.tree_map_only(torch.Tensor, change, tree)


# The dispatch layer -----------------------------------------------------------------------------------------------------


def dispatch(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decides about one operator."""
    if session.violation is not None:
        raise Refusal(session.violation)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    stores: dict[int, Store] = {}
    for tensor in tensors:
        store = store_of(session, tensor)
        if store is not None:
            stores[id(tensor)] = store
    empty_handed = any(not store.has_data for store in stores.values())
    if not isinstance(func, torch._ops.OpOverload):
        if empty_handed:
            _refuse_operator(session, str(func), str(func), tensors, stores)
        with quiet():
            return func(*args, **kwargs)
    name = func._schema.name.rpartition("::")[2]

    if name in ("record_stream", "_assert_async", "sym_constrain_range"):
        return None
    if name in ALLOCATIONS or name in FILLED:
        return _allocate(session, func, name, args, kwargs, stores)
    if empty_handed and torch._C._dispatch_has_kernel_for_dispatch_key(str(func.name()), "CompositeImplicitAutograd"):  # type: ignore[no-untyped-call]
        result = func.decompose(*args, **kwargs)  # only inference mode brings composites here
        if result is not NotImplemented:
            return result
    if tensors and (_is_view(func) or name == "_unsafe_view"):
        result = _view(session, func, args, kwargs, stores)
        if result is not NotImplemented:
            return result
    if name in ("fill_", "zero_", "copy_") and _fill(session, name, args, stores):
        return args[0]
    if name == "copy_" and session.phase == "load" and _load(args, stores):
        return args[0]
    if empty_handed or name in RANDOM_LIKE and session.phase == "forward" and empty_handed:
        _refuse_operator(session, name, str(func.name()), tensors, stores)  # type: ignore[no-untyped-call]
    return _compute(session, func, name, args, kwargs, stores)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    if not returns or returns[0].alias_info is None:
        return False
    return not any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
    )


def _view(session: Session, func: Any, args: Any, kwargs: Any, stores: dict[int, Store]) -> Any:
    """The views' geometry comes from the same operator on meta tensors; `NotImplemented` where it isn't a view."""
    owner: dict[int, Store] = {}

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        store = stores.get(id(tensor))
        if store is None:
            return tensor
        owner[store.meta._cdata] = store
        return _meta(store, tensor)

    with quiet():
        if kwargs.get("device") is not None:
            return NotImplemented
        result = func(*_map(args, to_meta), **_map(kwargs, to_meta))
        parts = pytree.tree_leaves(result)
        if any(part.untyped_storage()._cdata not in owner for part in parts if isinstance(part, torch.Tensor)):
            return NotImplemented
        return _map(result, lambda part: wrap(session, owner[part.untyped_storage()._cdata], part))


def _allocate(
    session: Session, func: Any, name: str, args: Any, kwargs: dict[str, Any], stores: dict[int, Store]
) -> Any:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        with quiet():
            return func(*args, **kwargs)
    changed = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    changed["device"] = torch.device("meta")
    with quiet():
        to_meta: Callable[[torch.Tensor], torch.Tensor] = lambda t: _meta(stores[id(t)], t) if id(t) in stores else t  # noqa: E731
        shape = func(*_map(args, to_meta), **changed)
        store = Store(session, "made", shape.untyped_storage().nbytes())
        if name in FILLED and store.size:
            value = FILLED[name](args, kwargs)
            store.fills.append((0, store.size, pattern(value, shape.dtype)))
        return wrap(session, store, shape)


def _fill(session: Session, name: str, args: Any, stores: dict[int, Store]) -> bool:
    """Records a fill of a tensor without data (or of one that nobody has needed yet); False if this isn't one."""
    target = args[0]
    store = stores.get(id(target))
    if store is None or store.kind not in ("made", "workspace", "input"):
        return False
    value: Any = 0
    if name != "zero_":
        value = args[1]
        if isinstance(value, torch.Tensor):
            source = stores.get(id(value))
            # A parameter's value must not become part of the plan: it differs from set to set.
            single = value.numel() > 0 and all(
                d == 1 or s == 0 for d, s in zip(value.size(), value.stride(), strict=True)
            )
            if not single or source is None or not source.has_data or source.from_parameters:
                return False
            with quiet():
                value = _real(source, value, write=False).flatten()[0].item()
    if target.numel():
        bits = pattern(value, target.dtype)
        session.fill(store, target.storage_offset(), tuple(target.size()), tuple(target.stride()), bits)
    return True


def _load(args: Any, stores: dict[int, Store]) -> bool:
    """A whole parameter loaded as it is stays that parameter instead of becoming a copy."""
    target, source = args[0], args[1]
    if not isinstance(target, RecordedTensor) or not isinstance(source, RecordedTensor):
        return False
    into, origin = stores[id(target)], stores[id(source)]
    same = (
        origin.kind == "parameter"
        and into.size == origin.size
        and target.dtype == source.dtype
        and target.size() == source.size()
        and target.stride() == source.stride()
        and target.storage_offset() == source.storage_offset() == 0
    )
    if same:
        into.kind, into.name, into.storage, into.fills = "parameter", origin.name, origin.storage, []
        into.from_parameters, into.undefined = True, False
        into.version += 1
    return same


def _compute(
    session: Session, func: Any, name: str, args: Any, kwargs: dict[str, Any], stores: dict[int, Store]
) -> Any:
    """Runs an operator on real bytes; what it makes is real too."""
    writes: set[int] = set()
    arguments = func._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
            writes.update(id(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    from_parameters = any(store.from_parameters for store in stores.values())
    originals: dict[int, torch.Tensor] = {}
    owners: dict[int, Store] = {}
    keep: list[torch.Tensor] = []
    plain_of: dict[int, torch.Tensor] = {}

    def to_plain(tensor: torch.Tensor) -> torch.Tensor:
        store = stores.get(id(tensor))
        if store is None:
            return tensor
        if id(tensor) not in plain_of:
            plain = _real(store, tensor, id(tensor) in writes)
            plain_of[id(tensor)] = plain
            originals[id(plain)] = tensor
            owners[plain.untyped_storage()._cdata] = store
            keep.append(plain)
        return plain_of[id(tensor)]

    def to_recorded(result: torch.Tensor) -> torch.Tensor:
        if id(result) in originals:
            return originals[id(result)]
        if result.device.type != "cpu" or result.layout != torch.strided:
            return result
        storage = result.untyped_storage()
        store = owners.get(storage._cdata)
        if store is None or store.storage is None:  # a made store that was only read lends no memory
            store = Store(session, "real", storage.nbytes())
            store.storage = storage
            store.from_parameters = from_parameters
            owners[storage._cdata] = store
        return wrap(session, store, result)

    changed = dict(kwargs)
    if changed.get("device") is not None and torch.device(changed["device"]).type == "cuda":
        changed["device"] = torch.device("cpu")
    changed.pop("pin_memory", None)
    with quiet():
        # Written arguments first: their store may get its memory by that, which other arguments may share.
        for leaf in pytree.tree_leaves((args, kwargs)):
            if id(leaf) in writes and isinstance(leaf, torch.Tensor):
                to_plain(leaf)
        result = func(*_map(args, to_plain), **_map(changed, to_plain))
        for identity in writes:
            if identity in stores and from_parameters:
                stores[identity].from_parameters = True
            if identity in stores and stores[identity].undefined is True:
                stores[identity].undefined = session.place() or False
        if name in READS and from_parameters and not isinstance(result, torch.Tensor):
            place = session.place()
            if place is not None and len(session.reads) < 20:
                session.reads.append(f"{place.file}:{place.line}")
        return _map(result, to_recorded)


def _refuse_operator(
    session: Session, name: str, full: str, tensors: list[torch.Tensor], stores: dict[int, Store]
) -> NoReturn:
    """Refuses an operator that has met a tensor without data, by its public name and what to use instead."""
    public = _calls[-1] if _calls else full
    operator = full.replace("::", ".")
    if name in READS:
        session.refuse(
            "input_read",
            f"{public} reads values of a tensor that has none: inputs and results of launches are not known when "
            "a candidate is recorded",
            BRANCH,
        )
    what = public if operator.startswith(public) else f"{public} ({operator})"
    kinds = {"input": "an input", "workspace": "what a kernel computes"}
    meets = next(
        (kinds[s.kind] for t in tensors if (s := stores.get(id(t))) is not None and not s.has_data), "an input"
    )
    types = {tensor.dtype for tensor in tensors}
    dtype_changes = name in COPY and (len(types) > 1 or name == "_to_copy" and "contiguous" not in public)
    place = session.place()
    branches = place is not None and place.source.strip().startswith(("if ", "elif ", "while ", "assert "))
    session.refuse(
        "framework_operator",
        f"{what} is a framework operator on {meets}: forward may only launch kernels, take views and allocate",
        BRANCH if branches else hint_for(name, dtype_changes),
    )


class DispatchLayer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends every operator through `dispatch`, those without a tensor argument too."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(self._session, func, args, kwargs or {})


# The function layer -----------------------------------------------------------------------------------------------------

_calls: list[str] = []
"""Public names of the PyTorch functions that the candidate is in, outermost last (inner ones aren't seen)."""


def _recorded(session: Session, tensor: torch.Tensor) -> torch.Tensor:
    store = store_of(session, tensor)
    if store is None or isinstance(tensor, RecordedTensor):
        return tensor
    return wrap(session, store, tensor)


def _has_data(session: Session, tensor: torch.Tensor) -> bool:
    store = store_of(session, tensor)
    return store is None or store.has_data


def _plain_copy(session: Session, tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The values as a plain CPU tensor; a refusal where there are none."""
    store = store_of(session, tensor)
    if store is None:
        return tensor
    if not store.has_data:
        session.refuse(
            "input_read",
            f"{what} reads values of a tensor that has none: inputs and results of launches are not known when a "
            "candidate is recorded",
            BRANCH,
        )
    if store.from_parameters:
        place = session.place()
        if place is not None and len(session.reads) < 20 and "repr" not in what:
            session.reads.append(f"{place.file}:{place.line}")
    with quiet():
        return _real(store, tensor, write=False).detach().clone()


def _to(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    copy = bool(kwargs.pop("copy", False))
    if len(args) == 4 or len(args) == 3 and isinstance(args[0], torch.dtype):
        copy, args = bool(args[-1]), args[:-1]
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        device, dtype, layout = None, other.dtype, kwargs.get("memory_format")
    else:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "meta":
        return func(tensor, *args, **kwargs)
    if device is not None:
        if device.type not in ("cpu", session.device):
            raise RuntimeError(f"the device is {session.device}; {device} is not here")
        if device.type == "cpu" and session.device == "cuda":
            return _to_host(session, tensor, dtype)
    tensor = _recorded(session, tensor)
    if not copy and dtype in (None, tensor.dtype) and layout in (None, torch.preserve_format):
        return tensor
    return func(tensor, dtype or tensor.dtype, copy=copy, memory_format=layout or torch.preserve_format)


def _to_host(session: Session, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    if not _has_data(session, tensor):
        _plain_copy(session, tensor, "a copy to the CPU")
    return tensor if dtype is None else torch.Tensor.to(tensor, dtype)


def _cuda(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if session.device == "cpu":
        raise RuntimeError("the device is cpu: there is no GPU here")
    return _recorded(session, tensor)


def _cpu(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return tensor if session.device == "cpu" else _to_host(session, tensor)


def _data_ptr(session: Session, func: Any, tensor: torch.Tensor) -> int:
    store = store_of(session, tensor)
    if store is None:
        return int(func(tensor))
    return store.address + int(tensor.storage_offset()) * tensor.element_size() if tensor.numel() else 0


def _numpy(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    plain = _plain_copy(session, tensor, f".{func.__name__}()")
    with quiet():
        return func(plain, *args, **kwargs)


def _repr(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    plain = _plain_copy(session, tensor, "printing a tensor (its repr)")
    with quiet():
        return func(plain, *args, **kwargs)


def _interface(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    session.refuse(
        "not_expressible",
        "another library can't take a recorded tensor: it has no memory behind it",
        "pass the tensor itself to a kernel of kf.load(..)",
    )


def _set_data(session: Session, func: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
    value = _recorded(session, value)
    if not isinstance(tensor, RecordedTensor) or not isinstance(value, RecordedTensor):
        func(tensor, value)
        return
    same = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype) == (
        value.size(),
        value.stride(),
        value.storage_offset(),
        value.dtype,
    )
    if not same:
        func(tensor, value)
    tensor._store = value._store


def _deepcopy(session: Session, func: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    if id(tensor) in memo:
        return memo[id(tensor)]
    copy = torch.Tensor.clone(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, tensor.requires_grad)
    memo[id(tensor)] = copy
    return copy


def _resize(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    session.refuse("not_expressible", f".{func.__name__}() changes a tensor in place", "take a view or allocate anew")


def _same(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return tensor


SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.data_ptr: _data_ptr,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.tolist: _numpy,
    torch.Tensor.__array__: _numpy,
    torch.Tensor.__repr__: _repr,
    torch.Tensor.__format__: _repr,
    torch.Tensor.__dlpack__: _interface,
    torch.Tensor.__cuda_array_interface__.__get__: _interface,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.resize_: _resize,
    torch.Tensor.t_: _resize,
    torch.Tensor.transpose_: _resize,
    torch.Tensor.squeeze_: _resize,
    torch.Tensor.unsqueeze_: _resize,
    torch.Tensor.swapdims_: _resize,
    torch.Tensor.swapaxes_: _resize,
    torch.Tensor.as_strided_: _resize,
    torch.Tensor.set_: _resize,
    torch.Tensor.pin_memory: _same,
    torch.Tensor.share_memory_: _same,
}
_QUICK = frozenset(
    {
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.device.__get__,
        torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.element_size,
        torch.Tensor.storage_offset,
        torch.Tensor.is_contiguous,
    }
)


class FunctionLayer(TorchFunctionMode):
    """Smooths what can't reach the dispatch layer without a GPU, and remembers the public names for messages."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _QUICK:
            return func(*args, **(kwargs or {}))
        session = self._session
        kwargs = dict(kwargs or {})
        special = SPECIAL.get(func)
        if special is not None and args and isinstance(args[0], torch.Tensor):
            return special(session, func, *args, **kwargs)
        device = kwargs.get("device")
        if device is not None and session.device == "cuda" and _names_cuda(device):
            kwargs["device"] = "cpu"  # the dispatch layer says what device its results are on
            kwargs.pop("pin_memory", None)
        _calls.append(_public_name(func))
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
            text = str(error)
            if not any(part in text for part in NO_DRIVER + NO_MEMORY_BEHIND):
                raise
            return self._without_driver(func, args, kwargs, error)
        finally:
            _calls.pop()

    def _without_driver(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """An operator that asked for a GPU before it was dispatched: refused, or run on real data."""
        session = self._session
        if session.violation is not None:
            raise Refusal(session.violation) from error
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        stores = {id(t): s for t in tensors if (s := store_of(session, t)) is not None}
        if not stores:
            raise error
        if any(not store.has_data for store in stores.values()):
            name = getattr(func, "__name__", str(func))
            _refuse_operator(session, name, _public_name(func), tensors, stores)
        with quiet():
            result = func(*_map(args, lambda t: _real(stores[id(t)], t, write=False)), **kwargs)
        tainted = any(store.from_parameters for store in stores.values())

        def back(part: torch.Tensor) -> torch.Tensor:
            recorded = _recorded(session, part)
            if isinstance(recorded, RecordedTensor):
                recorded._store.from_parameters |= tainted
            return recorded

        return _map(result, back)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, int):
        return True
    try:
        return torch.device(device).type == "cuda"
    except (RuntimeError, TypeError):
        return False


def _public_name(func: Any) -> str:
    name = getattr(func, "__name__", None) or str(func)
    module = getattr(func, "__module__", None)
    if isinstance(module, str) and module.startswith("torch.nn"):
        return f"{module}.{name}"
    owner = getattr(func, "__objclass__", None)
    if owner is not None:
        return f"Tensor.{name}"
    return f"torch.{name}" if hasattr(torch, name) else name
