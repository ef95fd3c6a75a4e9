"""The values of a forward that is being recorded, and the marks that it meets.

A value is a tensor with the shape, dtype and device of a fake tensor, and a number. Marks say which layer a step is in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import DisableTorchFunction, fake_tensor_mode, is_fake_tensor, storage_id
from penstock.errors import PlanError
from penstock.split.marks import Block, CutPoint, cut_points
from penstock.split.trace.recording import (
    Attribute,
    OwnDevice,
    Recording,
    Ref,
    compute_known,
    map_tree,
    needed_for,
    parent_paths,
)
from penstock.split.trace.state import place_of, recorder, user_line

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


class Value(Tensor):
    """A tensor of a forward that is being recorded."""

    fake: Tensor
    number: int
    known: bool  # it depends on the inputs alone
    source: Recording
    __class__ = property(lambda self: Tensor)  # as that of the plain model's tensors

    @staticmethod
    def __new__(cls: Any, fake: Tensor, number: int, known: bool, source: Recording) -> Value:
        value: Value = Tensor._make_wrapper_subclass(
            cls,
            fake.size(),
            strides=fake.stride() if fake.layout is torch.strided else None,
            storage_offset=fake.storage_offset() if fake.layout is torch.strided else 0,
            dtype=fake.dtype,
            layout=fake.layout,
            device=fake.device,
            requires_grad=fake.requires_grad,
        )
        value.fake, value.number, value.known, value.source = fake, number, known, source
        return value

    def computed(self) -> Tensor:
        """The data of a value that depends on nothing: a forward may keep it in a cache of its own."""
        steps = needed_for(self.source.steps, {self.number})
        inputs = [ref for step in steps for ref in step.refs() if type(ref) is Ref and ref.number in self.source.inputs]
        if inputs or not self.known:
            raise RuntimeError("a tensor of a recorded forward is used after the recording: the forward has kept it")
        return compute_known(steps, {}, nn.Module(), self.number)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Value({self.number}, shape={tuple(self.fake.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} was called on a tensor of a recorded forward in a way that is not recorded")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        active = recorder()
        if active is None:
            args, kwargs = map_tree((args, kwargs or {}), lambda leaf: leaf.computed() if type(leaf) is Value else leaf)
            return func(*args, **kwargs)
        return active.function(func, args, kwargs or {})


class _PlainTypeMeta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = type(*args, **kwargs)
        return Tensor if found is Value or (len(args) == 1 and is_fake_tensor(args[0])) else found

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)


class PlainType(type, metaclass=_PlainTypeMeta):
    """Stands for ``type`` in code that is recorded: ``type(x) is Tensor`` is true of the values of a recording."""


class KeepWhole(BaseException):
    """The recording starts again, with this module as one step. Not an Exception, so that no forward catches it."""

    def __init__(self, path: str, error: BaseException) -> None:
        super().__init__(path)
        self.path, self.error, self.place = path, error, place_of(error) or user_line()


class Enter(BaseException):
    """The recording starts again, with this module entered: it returns objects that hold tensors."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Marking:
    """Follows the marks of one forward. With ``silent``, modules begin layers and marks do nothing."""

    def __init__(self, model: nn.Module, silent: bool, result: Recording) -> None:
        self.cut_points = {} if silent else cut_points(model)
        self.silent = silent
        self.layer: str | None = None
        self.open: list[str | None] = []
        self.numbers: dict[Block, str] = {}  # of the blocks without names
        self.path = [""]  # of the modules whose forwards are running
        self.result = result

    @property
    def has_marks(self) -> bool:
        return bool(self.result.order) and not self.silent

    def mark(self, point: CutPoint | None, value: Any) -> Any:
        if self.silent:
            return value
        where, result = user_line(), self.result
        if point is None:
            line = where.rpartition("/")[2]
            seen = sum(name.partition("#")[0] == f"cut at {line}" for name in result.order)
            name = f"cut at {line}" + (f"#{seen + 1}" if seen else "")
        else:
            name = self.cut_points.get(id(point), f"CutPoint at {where}")
            if id(point) in result.points:
                raise PlanError(
                    f"the CutPoint {name} is used twice, at {result.lines[name]} and at {where}: "
                    "each is used once; make one for each place"
                )
            result.points.add(id(point))
        self._kind("cuts", where)
        self.begin_layer(name, where)
        return value

    def begin_layer(self, name: str, where: str) -> None:
        self.result.order.append(name)
        self.result.marked |= set(self.path)
        self.result.lines.setdefault(name, where)
        self.layer = name

    def enter(self, block: Block) -> None:
        self.open.append(self.layer)
        self.begin(block)

    def leave(self) -> None:
        outer = self.open.pop()
        if self.open and outer is not None:  # within another block; after the outermost, its name stays
            self.layer = outer

    def begin(self, block: Block) -> None:
        if self.silent:
            return
        where, result = user_line(), self.result
        name = block.name or self.numbers.setdefault(block, str(len(self.numbers)))
        self._kind("blocks", where)
        result.marked |= set(self.path)
        if name not in result.lines:
            self.begin_layer(name, where)
        if block.device is not None and result.devices.setdefault(name, block.device) != block.device:
            raise PlanError(
                f"block {name!r} is marked for {result.devices[name]} and, at {where}, for {block.device}: "
                "a block has one device"
            )
        self.layer = name

    def _kind(self, kind: str, where: str) -> None:
        if self.result.kind not in ("", kind):
            first = self.result.lines[self.result.order[0]]
            raise PlanError(f"the model is marked with cut points and with blocks ({first}, {where}): use one of them")
        self.result.kind = kind


class Values(Marking):
    """Makes the values of a recording, and the fake tensors that they are computed on."""

    def __init__(
        self, modules: Mapping[str, nn.Module], entered: Collection[str], silent: bool, result: Recording, tensors: Any
    ) -> None:
        super().__init__(modules[""], silent, result)
        self.entered = entered
        self.modules, self.model = modules, modules[""]
        self.mode = fake_tensor_mode()
        members = [(path, {**module._buffers, **module._parameters}) for path, module in modules.items()]
        self.names = {id(t): f"{path}.{name}".lstrip(".") for path, own in members[::-1] for name, t in own.items()}
        self.fakes: dict[int, tuple[Tensor, Tensor]] = {}
        self.storage_names: dict[int, str | None] = {}  # of parameters and buffers; None for other tensors of the model
        self.values: list[Value] = []
        self.value_of: dict[int, Value] = {}  # by identity of the fake tensor
        self.unknown: set[int] = set()  # storages whose contents do not depend on the inputs alone any more
        self.busy = 0  # above 0: functions and modules run as they are, on fake tensors
        self.captured: dict[int, tuple[str, Any]] = {}  # tensors inside of whole modules that hooks may have taken out
        self.device = _main_device(self.model, tensors)

    def _value(self, fake: Tensor, known: bool, label: str = "") -> Value:
        value = Value(fake, len(self.values), known, self.result)
        self.values.append(value)
        self.value_of.setdefault(id(fake), value)
        self.result.labels[value.number] = label
        return value

    def _storage(self, value: Value) -> int:
        return storage_id(value.fake) if value.fake.layout is torch.strided else -1 - value.number

    def _fake(self, tensor: Tensor) -> Tensor:
        """The fake tensor of a value, or of a real tensor: a parameter, a buffer or a constant."""
        if type(tensor) is Value:
            return tensor.fake
        if is_fake_tensor(tensor):
            return tensor
        if id(tensor) not in self.fakes:
            # A parameter may be on the host, because another rank runs its stage, or until its stage needs it.
            device = self.device if id(tensor) in self.names else self._canonical(tensor.device)
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
            with DisableTorchFunction(), torch.no_grad(), self.mode:
                if plain or hasattr(tensor, "placements"):  # of a DTensor, the shape of all its shards together
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                else:
                    fake = self.mode.from_tensor(tensor)
                if tensor.requires_grad:
                    fake.requires_grad_()
            self.fakes[id(tensor)] = (tensor, fake)
            if fake.layout is torch.strided:
                self.storage_names[storage_id(fake)] = self.names.get(id(tensor))
        return self.fakes[id(tensor)][1]

    def _canonical(self, device: torch.device) -> torch.device:
        """One device for all stages' devices: they may be on several of one kind, or have no memory yet."""
        return self.device if device.type in (self.device.type, "meta") else device

    def _all_fake(self, tree: Any) -> Any:
        return map_tree(tree, lambda leaf: self._fake(leaf) if isinstance(leaf, Tensor) else leaf)

    def _placed(self, tree: Any) -> Any:
        """A tree with placeholders in place of values, parameters, buffers and the device of the stages."""

        def leaf(value: Any) -> Any:
            if type(value) is Value:
                return Ref(value.number)
            if isinstance(value, Tensor):
                if is_fake_tensor(value):
                    return Ref(self._taken_out(value).number)
                name = self.names.get(id(value))
                return value if name is None else Attribute(name)
            if isinstance(value, torch.device) and self._canonical(value) == self.device:
                return OwnDevice()
            return value

        return map_tree(tree, leaf)

    def _known(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the inputs alone. Floating-point buffers may be changed by training."""
        if type(tensor) is Value:
            return tensor.known and self._storage(tensor) not in self.unknown
        name = self.names.get(id(tensor))
        if name is None:
            return not tensor.is_meta
        parents, _, last = name.rpartition(".")
        persistent = last not in self.model.get_submodule(parents)._non_persistent_buffers_set
        return not isinstance(tensor, nn.Parameter) and not tensor.is_meta and not (
            tensor.is_floating_point() and persistent
        )

    def _own_value(self, leaf: Any) -> Any:
        """A value of an earlier recording, which the forward has kept, as the constant that it is."""
        if type(leaf) is not Value or leaf.source is self.result:
            return leaf
        with self._running(), DisableTorchFunction():
            return leaf.computed()

    def _taken_out(self, tensor: Tensor) -> Value:
        """The value of a fake tensor that a hook has seen in a module that runs whole; else the module is entered."""
        if id(tensor) in self.value_of:
            return self.value_of[id(tensor)]
        if id(tensor) in self.captured:
            raise Enter(self.captured[id(tensor)][0])
        for path, module in self.modules.items():
            if any(value is tensor for value in vars(module).values()):
                raise Enter(self._unit_of(path))
        raise RuntimeError("a tensor that a module has computed is used outside of it, but it did not return it")

    def _unit_of(self, path: str) -> str:
        """The module that runs whole and has the module at ``path`` in it, or is it; nothing if that is entered."""
        outer = (unit for unit in (*parent_paths(path), path) if unit not in self.entered)
        return next((unit for unit in outer if not isinstance(self.modules[unit], (nn.ModuleList, nn.ModuleDict))), "")

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1


def _main_device(model: nn.Module, tensors: Sequence[Tensor] | None) -> torch.device:
    """The device that stands for those of all stages: of the accelerator, if there is one."""
    devices = [t.device for t in (*(tensors or ()), *model.parameters(), *model.buffers())]
    kinds = [device.type for device in devices if device.type not in ("cpu", "meta")]
    return torch.device(kinds[0], 0) if kinds else torch.device("cpu")
