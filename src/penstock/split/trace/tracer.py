"""Recording a forward as a list of operations, each with the layer that it belongs to. Modules stay whole.

    forward ──▶ call_module conv     layer None       (before any mark)
                call_function relu   layer None
                ── mark "cuts.0" ──
                call_module blocks.0 layer "cuts.0"   a leaf: the model's own module is called
                call_module head     layer "cuts.0"

A module is traced through only where a cut lies inside. Where that is not known beforehand, its forward is tried: if
no mark was met, what was recorded is dropped again and the module is a leaf.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import PlanError
from penstock.split.lazy import Lazy
from penstock.split.marks import Block, CutPoint, begin_block_of, forward_block_of
from penstock.split.sample import ModuleState
from penstock.split.trace.call import Call
from penstock.split.trace.context import AMBIENT, ambient, context_now
from penstock.split.trace.errors import cannot_trace, mentions_marks
from penstock.split.trace.inplace import roots
from penstock.split.trace.marks import Marking, Recording
from penstock.split.trace.proxy import FACTORIES, Member, RecordAll, Value, recorded_calls
from penstock.split.trace.state import recording, user_line

_LOCK = threading.RLock()  # torch.fx patches nn.Module for the time of a trace: one trace at a time


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class SegmentTracer(Marking, fx.Tracer):
    """Records one kind of call of a model.

    ``expands`` has the paths of the modules to trace through; None: those in which marks are met. ``starts(path)``
    gives the layer that begins with a module's call, where modules and not marks begin layers. ``lead`` is the block
    that is begun before anything runs.
    """

    def __init__(
        self,
        model: nn.Module,
        expands: Collection[str] | None,
        starts: Callable[[str], str | None] | None = None,
        lead: Block | None = None,
    ) -> None:
        Marking.__init__(self, model, silent=starts is not None)
        fx.Tracer.__init__(self, autowrap_functions=FACTORIES)
        self._autowrap_search.append(torch)
        self.model = model
        self.expands = expands
        self.starts = starts
        self.lead = lead
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.members = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
        self.thread = threading.get_ident()
        self.attributes: dict[str, fx.Proxy] = {}
        self.known: dict[int, str] = {}

    def record(self, call: Call, touched: Iterable[str] | None = None) -> Recording:
        """The forward as it runs for ``call``. The model is as it was before, whatever happens.

        ``touched`` are the paths of the modules whose code runs, where they are known: others may be running elsewhere.
        """

        def forward() -> Any:
            args, kwargs = call.filled(lambda name: self.create_proxy("placeholder", name.replace(".", "_"), (), {}))
            return self.model.forward(*args, **kwargs)

        self.result = Recording(call, fx.Graph())
        with _LOCK, ExitStack() as stack:
            modules = self.model.modules() if touched is None else map(self.model.get_submodule, touched)
            before = ModuleState(modules, alone=touched is None)
            stack.callback(before.restore)
            stack.enter_context(recording(self))
            stack.enter_context(ambient())
            stack.enter_context(RecordAll(self))
            stack.enter_context(recorded_calls(self, self.thread))
            if has_hooks(self.model):
                raise self._hooked("", self.model)
            for begins in (self.lead, begin_block_of(self.model)):
                if begins is not None:
                    self.begin(begins)
            try:
                self.trace(forward)
            except PlanError:
                raise
            except Exception as error:
                failure = cannot_trace(self.model, error, call)
                failure.marked = self.met > 0
                raise failure from error
            self.result.graph = self.graph
            self.result.expanded.add("")
            self.result.entered = self.result.expanded | self._leading()
            self._check_untouched(before)
        return self.result

    def _leading(self) -> set[str]:
        targets = [str(node.target).split(".") for node in self.graph.nodes if node.op in ("call_module", "get_attr")]
        paths = {".".join(parts[:i]) for parts in targets for i in range(1, len(parts))}
        return paths & set(self.paths.values())

    def _check_untouched(self, before: ModuleState) -> None:
        for path in sorted(self.result.entered):
            module = self.model.get_submodule(path)
            names = before.changed(module)
            if "_buffers" in names:
                names.remove("_buffers")
                prefix = f"{path}." if path else ""
                names += [name for name, value in module._buffers.items() if not self._is_itself(value, prefix + name)]
            if names:
                raise PlanError(
                    f"{_name(path, module)} sets {', '.join(names)} while it runs, and it is traced because cuts lie "
                    "inside: what it sets would be lost. Set it in a module without cuts of its own, or, if it is a "
                    "buffer, change it in place"
                )
        if before.random_drawn():
            raise PlanError(
                f"{type(self.model).__name__}.forward draws random numbers that a trace would freeze: draw them with "
                "torch (torch.rand, F.dropout), or in a module without cuts of its own"
            )

    def _is_itself(self, buffer: Any, name: str) -> bool:
        """Whether what stands for a buffer now is that buffer, as it was or changed in place (``self.count += 1``)."""
        if not isinstance(buffer, fx.Proxy):
            return buffer is None or id(buffer) in self.members
        return any(node.op == "get_attr" and node.target == name for node in roots(buffer.node))

    # -- modules -----------------------------------------------------------------------------------------------

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:  # another thread runs a model while this one traces
            return forward(*args, **kwargs)
        if isinstance(m, CutPoint):
            return self.mark(m, m.forward(*args, **kwargs))
        path = self.paths.get(id(m))
        if path is None:
            return self._foreign(m, args, kwargs)
        begins, scope = begin_block_of(m), forward_block_of(m)
        if begins is not None:
            self.begin(begins)
        if scope is None:
            return self._call(path, m, args, kwargs)
        self.enter(scope)
        try:
            return self._call(path, m, args, kwargs)
        finally:
            self.leave()

    def _call(self, path: str, m: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.starts is not None:
            name = self.starts(path)
            if name is not None:
                self.layer = name
                self.result.order.append(name)
                self.result.where.setdefault(name, user_line())
        if self.expands is None:
            return self._try(path, m, args, kwargs)
        if path not in self.expands:
            return self._leaf(path, m, args, kwargs)
        if has_hooks(m):
            raise self._hooked(path, m)
        self.result.expanded.add(path)
        return m.forward(*args, **kwargs)

    def _leaf(self, path: str, m: nn.Module, args: Any, kwargs: Any) -> Any:
        value = self.create_proxy("call_module", path, args, kwargs)
        value.node.meta["inplace"] = bool(getattr(m, "inplace", False))
        return value

    def _try(self, path: str, m: nn.Module, args: Any, kwargs: Any) -> Any:
        if isinstance(m, (torch.jit.ScriptModule, Lazy)) or all(_builtin(part) for part in m.modules()):
            return self._leaf(path, m, args, kwargs)
        met, layer, depth = self.met, self.layer, len(self.open)
        last, attributes = next(iter(reversed(self.graph.nodes)), None), dict(self.attributes)
        before = ModuleState(m.modules())
        try:
            output = m.forward(*args, **kwargs)
        except PlanError:
            raise
        except Exception as error:
            failure = cannot_trace(m, error, None, path)
            if self.met != met or mentions_marks(m):
                failure.marked = True
                raise failure from error
        else:
            if self.met != met:
                if has_hooks(m):
                    raise self._hooked(path, m)
                self.result.expanded.add(path)
                return output
        before.restore()
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
        self.layer, self.attributes = layer, attributes
        del self.open[depth:]
        return self._leaf(path, m, args, kwargs)

    def _foreign(self, m: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module that the model does not own: a function, as long as it has no parameters that would be lost."""
        if next(m.parameters(), None) is not None:
            raise PlanError(
                f"{user_line()}: the {type(m).__name__} that is called here has parameters, but the model does not "
                "know it (is it in a plain list?): keep it as an attribute or in an nn.ModuleList"
            )
        node = self.create_node("call_function", m, self.create_arg(args), self.create_arg(kwargs), type(m).__name__)
        return self.proxy(node)

    def _hooked(self, path: str, m: nn.Module) -> PlanError:
        return PlanError(
            f"{_name(path, m)} has hooks, and no stage runs the whole of it because cuts lie inside: "
            "register the hooks on modules that are not cut"
        )

    # -- what torch.fx asks ------------------------------------------------------------------------------------

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if threading.get_ident() != self.thread or not isinstance(attr_val, Tensor):
            return attr_val
        name = self.members.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in self.attributes:
            node = self.create_node("get_attr", name, (), {})
            parameter = isinstance(attr_val, nn.Parameter)
            self.attributes[name] = Member(node, self, attr_val) if parameter else Value(node, self)
        return self.attributes[name]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        node.meta["layer"] = self.layer
        node.meta["where"] = user_line()
        context = context_now()
        if context != AMBIENT:
            node.meta["context"] = context
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Tensor):
            name = self.members.get(id(a))
            if name is None:
                name = self.known.setdefault(id(a), f"constant {len(self.known)}")
                self.result.constants[name] = a
            return self.create_node("get_attr", name, (), {}, f"attribute_{len(self.graph.nodes)}")
        if isinstance(a, (nn.Module, torch.Generator)):
            raise PlanError(f"{user_line()}: a {type(a).__name__} is passed on as a value, which cannot be traced")
        kind = type(a)
        if isinstance(a, dict) and kind is not dict:
            if not dataclasses.is_dataclass(a):
                raise NotImplementedError(f"a {kind.__name__} made in forward")
            fields = {entry.name: self.create_arg(getattr(a, entry.name)) for entry in dataclasses.fields(a)}
            return self.create_node("call_function", kind, (), fields)
        try:
            return super().create_arg(a)
        except NotImplementedError:
            raise NotImplementedError(f"a {kind.__name__} made in forward") from None


def _builtin(module: nn.Module) -> bool:
    """Whether torch made the class: such a forward has no marks in it."""
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn.")) and "forward" not in vars(module)


def _name(path: str, module: nn.Module) -> str:
    return f"{path} ({type(module).__name__})" if path else type(module).__name__
