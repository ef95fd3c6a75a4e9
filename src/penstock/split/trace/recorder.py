"""Record a forward by running it on tensors without data.

Inputs are ``Value`` tensors: each has the shape, dtype and device of a fake tensor, and a number. Python code on types,
shapes, dtypes, None and containers therefore just runs. A call of a torch function on values is computed on their fake
tensors and recorded; a call of a module that is not entered is recorded as one step.

    data that depends on the inputs alone    the sample's value is used, and the answer belongs to the recording's key
    data that parameters had a part in       the innermost module that asks stays whole, and the recording starts again
"""

from __future__ import annotations

import copy
import enum
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import index
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions
from torch.utils.checkpoint import CheckpointFunction

from penstock._torch import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    has_global_module_hooks,
    is_fake_tensor,
    replaced_checkpoint,
    storage_id,
    unchecked_data,
    unlogged_fake_tensor_errors,
)
from penstock.errors import PlanError
from penstock.split.lazy import Lazy
from penstock.split.marks import Block, CutPoint, begin_block_of, forward_block_of
from penstock.split.module_state import ModuleState, RandomStates, contents, own_generators, same_values
from penstock.split.trace.call import call_text, forward_arguments, rebuild
from penstock.split.trace.errors import CannotTrace, cannot_trace, is_data_dependent
from penstock.split.trace.python_state import (
    PythonState,
    attribute_of,
    dictionary_of,
    environment_variable,
    forward_function,
    is_watched,
    outer_values,
    scopes_with_type,
    whole_environment,
)
from penstock.split.trace.recording import (
    Attribute,
    Recording,
    ResultTensor,
    Step,
    changed_context,
    compute_known,
    context_now,
    evaluate,
    from_answer,
    is_uniform,
    leaves_of,
    map_tree,
    needed_for,
    template_of,
)
from penstock.split.trace.state import LIBRARY, is_users_code, recording_in_thread, user_line
from penstock.split.trace.values import PLAIN_TYPES, Enter, KeepWhole, PlainType, Value, Values

_LOCK = threading.RLock()  # a recording patches nn.Module for all threads: one at a time
_NO_WRAP = get_default_nowrap_functions()
_RANDOM = re.compile(r"rand|normal|dropout|bernoulli|multinomial|uniform|exponential|geometric|poisson|cauchy")
_NUMBER = re.compile(r"idx|index|_id$|^id$|number")  # attributes in which modules that are alike differ
_MISSING: Any = object()
_EFFECTS = (Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """``F.one_hot`` for fake tensors: torch looks at the data even where the number of classes is given."""
    if num_classes < 0:
        return F.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """``torch.bincount`` for fake tensors, if no value is expected to reach ``minlength``; the replay checks it."""
    if not minlength:
        return torch.bincount(tensor, weights)
    return torch.empty(minlength, dtype=torch.long if weights is None else weights.dtype, device=tensor.device)


def _ctc_loss(log_probs: Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> Tensor:
    """``F.ctc_loss`` for fake tensors: torch reads the lengths."""
    reduction = args[4] if len(args) > 4 else reduction
    return log_probs.sum((0, -1)) if reduction == "none" else log_probs.sum()


WITHOUT_DATA: dict[Any, Callable[..., Tensor]] = {
    F.one_hot: _one_hot,
    F.ctc_loss: _ctc_loss,
    torch.bincount: _bincount,
}


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """The class, configuration, parameters and buffers of a module, without numbers of blocks."""
    members = [(name, *_kind(tensor)) for name, tensor in (*module.named_parameters(), *module.named_buffers())]
    attributes = [
        (path, name, value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str)) and name != "training" and not _NUMBER.search(name)
    ]
    return type(module), repr(module), tuple(members), tuple(attributes)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


class _RecordFunctions(TorchFunctionMode):
    """Sees calls of functions without values among their arguments too: torch.arange, or parameters alone."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.function(func, args, kwargs or {})


class Recorder(Values):
    """Records one call of a model, which is the first of ``modules``.

    ``entered`` are the modules whose forwards are recorded, and ``starts(path)`` is the layer that begins with a call
    of a module, where modules and not marks begin layers. ``tensors`` are the inputs' data; where a rank does not have
    them, ``answers`` are those of the rank that has.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        key: str,
        call: Mapping[str, Any],
        *,
        entered: Collection[str],
        whole: Collection[str] = (),
        starts: Callable[[str], str | None] | None,
        lead: Block | None = None,
        tensors: Sequence[Tensor] | None = None,
        answers: Sequence[Any] | None = None,
        parameters: Mapping[str, Any],
        signatures: dict[str, Any],
        read: PythonState,
    ) -> None:
        result = Recording(key, call_text(modules[""], call), call)
        super().__init__(modules, set(entered) - set(whole), starts is not None, result, tensors)
        self.call, self.parameters = call, parameters
        self.whole = whole
        self.starts, self.lead = starts, lead
        self.tensors, self.answers = tensors, answers
        self.paths = {id(module): path for path, module in modules.items()}
        self.watched = {id(module) for module in modules.values() if not isinstance(module, torch.jit.ScriptModule)}
        self.context = context_now()
        self.checkpoint: bool | None = None  # whether a checkpoint that is running is a reentrant one
        self.owned = {id(value) for module in modules.values() for value in vars(module).values()}
        self.signatures = signatures  # of modules, by path
        self.alike: dict[Any, tuple[Any, bool, list[str]]] = {}  # results of modules, and the buffers they change
        self.changed_buffers: list[str] = []  # by the last module
        self.inferred_from_data = False  # whether the shapes of the last module's result are those for zeros
        self.running = self.model  # the module that runs whole
        self.read = read
        self.first_read: set[tuple[int, str]] = set()  # attributes by id of the module, if not set before
        self.written: dict[tuple[int, str], str] = {}  # attributes by id of the module, with the line
        self.generators: list[Any] = []  # random generators of the model
        self.hooks_before = {id(hook) for module in modules.values() for hook in module._forward_hooks.values()}

    def record(self) -> Recording:
        """Run the forward. The model and the random generators are as before, whatever happens."""
        result, model = self.result, self.model
        with _LOCK, ExitStack() as stack:
            before = ModuleState(self.modules.values())
            stack.callback(before.restore)
            entered = [self.modules[path] for path in sorted(self.entered)]
            for module in entered:
                self.read.add_forward(module)
            variables = outer_values(entered)
            outer = RandomStates(own_generators(self.read.values()))  # such as a global numpy.random.Generator
            stack.callback(outer.restore)
            self.generators = [*before.random.own, *outer.own]
            stack.enter_context(recording_in_thread(self))
            for scope in scopes_with_type(self.modules.values()):
                scope["type"] = PlainType
                stack.callback(scope.pop, "type")
            stack.enter_context(_patched(self))
            if user_hooks(model) or has_global_module_hooks():
                raise hooked_module("", model)
            args, kwargs = self._inputs()
            for begins in (self.lead, begin_block_of(model)):
                if begins is not None:
                    self.begin(begins)
            try:
                with _RecordFunctions(self):
                    result.entered.add("")
                    output = model.forward(*args, **kwargs)
            except (PlanError, KeepWhole, Enter):
                raise
            except Exception as error:
                failure = cannot_trace(model, error, result.text)
                failure.marked = self.has_marks
                raise failure from error
            result.output = self._placed(output)
            self._check_output(output)
            self._check_state(before)
            if before.random.drawn() or outer.drawn():
                raise CannotTrace(
                    f"{type(model).__name__}.forward draws random numbers that a recording would freeze: draw them "
                    "with torch (torch.rand, F.dropout), or in a module without cuts of its own",
                    definite=True,
                )
            now = outer_values(entered)
            if changed := [name for key, (name, values) in variables.items() if not same_values(values, now[key][1])]:
                message = f"{type(model).__name__}.forward changes the variable {changed[0]}"
                raise CannotTrace(f"{message}: do it in a module without cuts of its own", definite=True)
            self._check_questions()
        result.storages = {value.number: self._storage(value) for value in self.values}
        return result

    def _inputs(self) -> tuple[list[Any], dict[str, Any]]:
        def value(described: list[Any], _: Any) -> Value:
            shape, dtype, requires_grad, *stride = described
            with self.mode:
                fake = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                fake = torch.empty_strided(shape, stride, dtype=fake.dtype, device=self.device) if stride else fake
                fake.requires_grad_(requires_grad)
                fake = fake.clone() if requires_grad else fake  # it need not be a leaf of the caller's graph
            made = self._value(fake, True)
            self.result.inputs.append(made.number)
            return made

        values = {}
        for name, spec in self.call.items():
            count = len(self.result.inputs)
            values[name] = rebuild(spec, None, value)
            for number in self.result.inputs[count:]:
                self.result.labels[number] = name
        return forward_arguments(values, self.parameters)

    # ── functions ────────────────────────────────────────────────────────────────────────────────────────────────

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of a torch function: run it on fake tensors, and record it."""
        if self.busy:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if any(type(leaf) is Value and leaf.source is not self.result for leaf in leaves_of((args, kwargs))):
            args, kwargs = map_tree((args, kwargs), self._own_value)
        if func is Tensor.__iter__ or func is Tensor.__reversed__:
            rows = self.function(torch.unbind, args, {})
            return iter(rows if func is Tensor.__iter__ else rows[::-1])
        if func is Tensor.__getitem__ or func is Tensor.__setitem__:
            items = args[1] if type(args[1]) is tuple else (args[1],)
            if any(type(item) is slice and Value in map(type, (item.start, item.stop, item.step)) for item in items):
                args = (args[0], tuple(map(_plain_slice, items)), *args[2:])
        if func is Tensor.__getitem__ and not self._known(args[0]):
            args = (args[0], self._integer_index(args[1]))
        name = getattr(func, "__name__", "")
        if name == "__get__" or func in _NO_WRAP:
            found = self._read(func, args, kwargs)
            if found is not NotImplemented:
                return found
        if name in ("__set__", "__delete__"):
            return self._assign(func, args)
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        tensors = [self._taken_out(tensor) if is_fake_tensor(tensor) else tensor for tensor in tensors]
        if func in _EFFECTS and any(type(item) is Value for hook in args[1:] for item in contents(hook) or ()):
            text = "a hook uses a tensor of the forward: register it in a module without cuts of its own"
            raise self._refuse(CannotTrace(f"{user_line()}: {text}", definite=True))
        known = all(map(self._known, tensors)) and (is_uniform(func) or not _RANDOM.search(name))
        known = known and func not in _EFFECTS
        versions = [self._version(tensor) for tensor in tensors]
        step = Step(func, None, None, [], self.layer, "", known=known, context=changed_context(self.context))
        try:
            with self._running(), self.mode, DisableTorchFunctionSubclass():
                result = WITHOUT_DATA.get(func, func)(*self._all_fake(args), **self._all_fake(kwargs))
            if isinstance(result, Tensor) and func in (torch.tensor, torch.as_tensor) and not is_fake_tensor(result):
                result = self._fake(result)
        except Exception as error:
            if not is_data_dependent(error):
                raise
            result = self._ask(step, func, args, kwargs, error)
        return self._note(step, args, kwargs, tensors, versions, result)

    def _integer_index(self, index: Any) -> Any:
        """An index without masks that depend on the inputs alone: the shape of ``x[mask]`` depends on their values."""
        items: list[Any] = []
        for item in index if type(index) is tuple else (index,):
            if type(item) is Value and item.dtype in (torch.bool, torch.uint8) and self._known(item):
                items.extend(self.function(Tensor.nonzero, (item,), {"as_tuple": True}))
            else:
                items.append(item)
        return tuple(items) if type(index) is tuple or len(items) > 1 else items[0]

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An attribute that is no tensor, such as a shape; NotImplemented if it is a tensor that depends on data."""
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "grad" and isinstance(args[0], nn.Parameter):
            text = f"{user_line()}: the forward reads the gradient of a parameter, which steps change"
            raise self._refuse(CannotTrace(f"{text}: do it in a module without cuts of its own", definite=True))
        if name == "requires_grad":  # that of a value follows from those of the parameters
            self.read.add_flags([args[0]] if isinstance(args[0], nn.Parameter) else self.model.parameters())
        with self._running(), self.mode, DisableTorchFunctionSubclass():
            found = func(*self._all_fake(args), **self._all_fake(kwargs))
        if isinstance(found, Tensor):
            return NotImplemented
        return found

    def _assign(self, func: Any, args: Any) -> Any:
        """``x.requires_grad = True`` and ``x.data = y``."""
        if getattr(getattr(func, "__self__", None), "__name__", "") != "requires_grad" or type(args[0]) is not Value:
            raise RuntimeError(f"an assignment to an attribute of a tensor is not recorded: {func}")
        return self.function(Tensor.requires_grad_, args, {})

    # ── attributes and global variables ──────────────────────────────────────────────────────────────────────────

    def attribute_read(self, module: nn.Module, name: str) -> None:
        """Code outside of whole modules reads an attribute of a module, or asks whether there is one."""
        key = (id(module), name)
        if (
            name == "__dict__"
            and key[0] in self.watched
            and not sys._getframe(2).f_code.co_filename.startswith(LIBRARY)
        ):
            for variable in dictionary_of(module):
                self.first_read.add((key[0], variable[1]))
                self.read.add(*variable)
        if not is_watched(name) or key[0] not in self.watched or key in self.first_read:
            return
        attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
        members = (attributes[kind] for kind in ("_modules", "_parameters", "_buffers"))
        if key not in self.written and all(kind.get(name) is None for kind in members):
            self.first_read.add(key)
            self.read.add(*attribute_of(module, name))

    def attribute_set(self, module: nn.Module, name: str, value: Any) -> None:
        """Code outside of whole modules sets an attribute of a module. One that stays whole would not see it."""
        path = self.paths.get(id(module))
        if path is None or (type(value) in PLAIN_TYPES and vars(module).get(name, _MISSING) == value):
            return
        self.written.setdefault((id(module), name), user_line())
        unit = self._unit_of(path)
        if unit and can_enter(self.modules[unit]) and unit not in self.whole:
            raise Enter(unit)
        if unit:
            text = f"{user_line()}: the forward sets {path}.{name}, and {unit} runs as a whole in a stage"
            remedy = "set it before the step, or in a module without cuts of its own"
            raise self._refuse(CannotTrace(f"{text}: {remedy}", definite=True))

    def _version(self, tensor: Tensor) -> int:
        return self._fake(tensor)._version

    def _ask(self, step: Step, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """The result of a function that depends on data: from the inputs, or as the rank with the inputs found it."""
        index = len(self.result.answers)
        if not step.known:
            raise self._refuse(error)
        step.asks = True
        step.args, step.kwargs = self._placed(args), self._placed(kwargs)
        if self.answers is not None:
            answer = self.answers[index]
        elif self.tensors is None:
            raise self._refuse(error)
        else:
            steps = needed_for([*self.result.steps, step])
            env = dict(zip(self.result.inputs, self.tensors, strict=True))
            with self._running(), DisableTorchFunction():
                found = evaluate(steps, env, self.model)
            if found is None:  # it depends on a random number
                raise self._refuse(error)
            answer = found[-1]
        self.result.answers.append(answer)
        step.answer = answer
        with self.mode:
            return from_answer(answer, self.device)

    def _refuse(self, error: Exception) -> BaseException:
        """The innermost module stays whole; if that is the model, it is an error, which no forward catches."""
        return KeepWhole(self.path[-1], error)

    def _note(
        self, step: Step, args: Any, kwargs: Any, tensors: Sequence[Tensor], versions: Sequence[int], result: Any
    ) -> Any:
        """Record a step whose result on fake tensors is ``result``; returns it as values."""
        changed = [t for t, version in zip(tensors, versions, strict=True) if self._version(t) != version]
        inside = leaves_of(result)
        has_tensors = any(isinstance(leaf, Tensor) for leaf in inside)
        if not (has_tensors or changed or step.asks or step.module or step.target in _EFFECTS):
            return result
        step.args, step.kwargs, step.where = self._placed(args), self._placed(kwargs), user_line()
        self.read.add_running(sys._getframe(1), Recorder.record.__code__)
        step.changes = frozenset(self._storage(t) for t in changed if type(t) is Value)
        storages = {storage_id(self._fake(t)) for t in changed if t.layout is torch.strided} & self.storage_names.keys()
        changed_names = {self.storage_names[storage] for storage in storages}
        if None in changed_names:
            text = "a tensor that is neither a parameter nor a buffer is changed in place: make it a buffer"
            raise self._refuse(CannotTrace(f"{user_line()}: {text}, or do it in a module without cuts", definite=True))
        if step.target is F.batch_norm:  # fake tensors do not show that it changes the running statistics
            changed_names |= {self.names.get(id(t)) for t in tensors if not isinstance(t, nn.Parameter)} - {None}
        step.changed_names += tuple(name for name in changed_names if name is not None)
        if not step.known:
            self.unknown |= step.changes
        same = {id(self._fake(tensor)): tensor for tensor in tensors}
        label = step.target if step.module else getattr(step.target, "__name__", str(step.target))

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                step.outputs.append(None)
                return leaf
            known = same.get(id(leaf))
            if known is None:
                known = self._value(leaf, step.known, label)
            elif type(known) is not Value and id(known) in self.names and step.module:
                known = self._value(leaf, False, label)
            step.outputs.append(known.number if type(known) is Value else None)
            if not step.module and step.target in WITHOUT_DATA:
                step.shape = tuple(leaf.shape)
            return known

        made = map_tree(result, value)
        if not any(number is not None for number in step.outputs) and not step.module:
            step.outputs = []
        self.result.steps.append(step)
        return made

    # ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.busy:
            return self._call_inside(module, args, kwargs)
        if isinstance(module, CutPoint):
            return self.mark(module, module.forward(*args, **kwargs))
        path = self.paths.get(id(module))
        if path is None:
            if next(module.parameters(), None) is not None:
                raise CannotTrace(
                    f"{user_line()}: the {type(module).__name__} that is called here has parameters, but the model "
                    "does not know it: keep it as an attribute or in an nn.ModuleList, not in a plain list; if the "
                    "forward makes it at its first call, run the model once before the split",
                    definite=True,
                )
            return _original_call(module, *args, **kwargs)
        if any(id(t) not in self.names for t in (*module.parameters(), *module.buffers())):
            return _original_call(module, *args, **kwargs)  # by torch.func.functional_call, on other parameters
        begins, scope = begin_block_of(module), forward_block_of(module)
        if begins is not None:
            self.begin(begins)
        if scope is not None:
            self.enter(scope)
        try:
            return self._call(path, module, args, kwargs)
        finally:
            if scope is not None:
                self.leave()

    def _call_inside(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call within a module that runs whole, on fake tensors. The model's own hooks may take its output out."""
        if isinstance(module, Lazy):
            return torch.func.functional_call(self._outline(module), self._state(module), args, kwargs)
        result = module.forward(*args, **kwargs)
        if module is self.running:  # its hooks run on the values
            return result
        if self._has_own_hooks(module):
            for leaf in leaves_of((args, result)):
                self.captured[id(leaf)] = (self.paths[id(self.running)], leaf)
        return self._run_own_hooks(module, args, kwargs, result)

    def _has_own_hooks(self, module: nn.Module) -> bool:
        return any(map(self._is_own_hook, module._forward_hooks.values()))

    def _is_own_hook(self, hook: Any) -> bool:
        """Whether a hook is part of the model's forward: registered while it runs, or by its library."""
        return id(hook) not in self.hooks_before or _belongs_to_library(hook, self.model)

    def _run_own_hooks(self, module: nn.Module, args: Any, kwargs: Any, made: Any) -> Any:
        for key, hook in list(module._forward_hooks.items()):
            if self._is_own_hook(hook):
                with_kwargs = key in module._forward_hooks_with_kwargs
                changed = hook(module, args, kwargs, made) if with_kwargs else hook(module, args, made)
                made = made if changed is None else changed
        return made

    def _call(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        enters = path in self.entered
        if self.starts is not None:
            name = self.starts(path)
            if name is not None:
                self.begin_layer(name, user_line())
        if not enters:
            return self._call_whole(path, module, args, kwargs)
        if user_hooks(module, self.hooks_before, self.model):
            raise hooked_module(path, module)
        self.path.append(path)
        self.result.entered.add(path)
        try:
            return _original_call(module, *args, **kwargs)
        except (KeepWhole, Enter, PlanError):
            raise
        except Exception as error:
            raise KeepWhole(path, error) from error
        finally:
            self.path.pop()

    def _call_whole(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        with DisableTorchFunction():
            tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
            versions = [self._version(tensor) for tensor in tensors]
            if any(map(self._has_state, leaves_of((args, kwargs)))) and can_enter(module):
                raise Enter(path)
            step = Step(path, None, None, [], self.layer, "", module=True, context=changed_context(self.context))
            if type(module).__call__ is nn.Module.__call__:  # else its own call has the checkpoint in it
                step.checkpoint = self.checkpoint
            result = self._run_module(path, module, args, kwargs)
            if any(not isinstance(leaf, (Tensor, *PLAIN_TYPES)) for leaf in leaves_of(result)) and can_enter(module):
                raise Enter(path)
            step.result, step.checks_shapes = template_of(result, ()), self.inferred_from_data
            step.changed_names = tuple(f"{path}.{name}" for name in (*self.changed_buffers, *_renormalised(module)))
            made = self._note(step, args, kwargs, tensors, versions, result)
        return self._run_own_hooks(module, args, kwargs, made)

    def _has_state(self, leaf: Any) -> bool:
        """Whether an argument is an object that the forward has made, such as a cache: a step would keep it."""
        if isinstance(leaf, (Tensor, *PLAIN_TYPES, type, enum.Enum)) or callable(leaf) or id(leaf) in self.owned:
            return False
        return bool(getattr(leaf, "__dict__", None))

    @contextmanager
    def checkpointing(self, *, reentrant: bool) -> Iterator[None]:
        """Modules that are called here are called by ``torch.utils.checkpoint`` in the replay, too."""
        before, self.checkpoint = self.checkpoint, reentrant
        try:
            yield
        finally:
            self.checkpoint = before

    def _run_module(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a whole module, on fake tensors."""
        outline, self.running, self.inferred_from_data = self._outline(module), module, False
        self.changed_buffers = []
        given, given_kwargs = self._all_fake(args), self._all_fake(kwargs)
        inputs = [leaf for leaf in leaves_of((given, given_kwargs)) if isinstance(leaf, Tensor)]
        key = self._alike_key(path, outline, given, given_kwargs, inputs)
        if key in self.alike:
            template, self.inferred_from_data, self.changed_buffers = self.alike[key]
            return self._from_template(template, inputs)
        versions, captured = [tensor._version for tensor in inputs], len(self.captured)
        generators = RandomStates(self.generators)  # a module that stays whole may draw random numbers in any way
        try:
            with self._running(), self.mode, DisableTorchFunction():
                if isinstance(outline, torch.jit.ScriptModule):
                    raise NotImplementedError
                state = self._state(module)
                before = {name: tensor._version for name, tensor in state.items()}
                result = torch.func.functional_call(outline, state, given, given_kwargs, tie_weights=False)
                self.changed_buffers = [name for name, tensor in state.items() if tensor._version != before[name]]
        except Exception as error:
            result = self._run_for_real(path, outline, args, kwargs, error)
            self.inferred_from_data = True
        finally:
            with self._running():
                generators.restore()
        unchanged = versions == [tensor._version for tensor in inputs] and captured == len(self.captured)
        strided = all(t.layout is torch.strided for t in leaves_of(result) if isinstance(t, Tensor))
        if unchanged and strided and all(isinstance(leaf, (Tensor, *PLAIN_TYPES)) for leaf in leaves_of(result)):
            self.alike[key] = template_of(result, inputs), self.inferred_from_data, self.changed_buffers
        return result

    def _alike_key(self, path: str, module: nn.Module, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> Any:
        """Equal for calls of modules that are alike, with arguments that are alike: blocks of a list run once."""
        if path not in self.signatures:
            self.signatures[path] = _signature(module)
        metas = [(*_kind(t), t.stride()) if t.layout is torch.strided else id(t) for t in inputs]
        same = [next(i for i, other in enumerate(inputs) if other is tensor) for tensor in inputs]
        plain = map_tree((args, kwargs), lambda leaf: 0 if isinstance(leaf, Tensor) else leaf)
        flags = tuple(part.training for part in module.modules())
        return self.signatures[path], flags, tuple(metas), tuple(same), repr(plain), context_now()

    def _from_template(self, template: Any, inputs: Sequence[Tensor]) -> Any:
        """The result of a module as that of another one that is alike."""

        def leaf(value: Any) -> Any:
            if type(value) is not ResultTensor:
                return value
            if value.same is not None:
                return inputs[value.same]
            if value.view_of is not None:
                return inputs[value.view_of].as_strided(*value.size)
            return value.empty()

        with self._running(), self.mode, DisableTorchFunction():
            return map_tree(template, leaf)

    def _outline(self, module: nn.Module) -> nn.Module:
        with self._running():
            outline = module.outline() if isinstance(module, Lazy) else module
        if outline is None:
            raise PlanError(f"{module!r} cannot be built on the meta device: build it before the split")
        return outline

    def _state(self, module: nn.Module) -> dict[str, Tensor]:
        """Fake parameters and buffers of a module; those of buffers are copies, which it may change."""
        outline = self._outline(module)
        state = {name: self._fake(p) for name, p in outline.named_parameters(remove_duplicate=False)}
        buffers = {name: self._fake(b) for name, b in outline.named_buffers(remove_duplicate=False)}
        clones = {id(fake): fake.clone() for fake in buffers.values()}
        return {**state, **{name: clones[id(fake)] for name, fake in buffers.items()}}

    def _run_for_real(self, path: str, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> Any:
        """The result of a module that fake tensors cannot follow, from a copy of it that runs on real tensors.

        Values that depend on the inputs alone have their data, the others are zeros.

        Where that fails too, the module is entered, unless it was before.
        """
        failure: BaseException = Enter(path) if can_enter(module) and path not in self.whole else error
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            raise failure
        if any(map(self._has_own_hooks, module.modules())):  # they would see real tensors
            raise failure

        def real(leaf: Any) -> Any:
            if type(leaf) is not Value:
                return leaf
            if self.tensors is not None and self._known(leaf):
                inputs = dict(zip(self.result.inputs, (t.detach().clone() for t in self.tensors), strict=True))
                return compute_known(needed_for(self.result.steps, {leaf.number}), inputs, self.model, leaf.number)
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad)

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self.device)
            return made.requires_grad_().clone() if leaf.requires_grad else made

        device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        try:
            with self._running(), DisableTorchFunction(), torch.random.fork_rng([]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                copied = module if isinstance(module, torch.jit.ScriptModule) else copy.deepcopy(module)
                found = copied(*map_tree(args, real), **map_tree(kwargs, real))
        except Exception as inner:
            raise failure from inner
        with self._running(), self.mode, DisableTorchFunction():
            return map_tree(found, fake)

    # ── checks at the end ────────────────────────────────────────────────────────────────────────────────────────

    def _check_output(self, output: Any) -> None:
        for leaf in leaves_of(output):
            inside = () if isinstance(leaf, (Tensor, *PLAIN_TYPES)) else getattr(leaf, "__dict__", {}).values()
            if any(isinstance(value, Tensor) for value in inside):
                raise CannotTrace(
                    f"{type(self.model).__name__}.forward returns a {type(leaf).__name__}, which holds tensors: return "
                    "a tensor, a tuple, a dict or a dataclass",
                    definite=True,
                )

    def _check_state(self, before: ModuleState) -> None:
        """The forward of an entered module does not run again: the next call must not depend on state that it keeps."""
        for path in {str(step.target) for step in self.result.steps if step.module}:
            for inner, part in self.modules[path].named_modules(prefix=path):
                if id(part) not in self.paths:  # the module has put it there when it ran
                    self.result.counts.setdefault(path, []).append(inner)
                    continue
                if type(part).__module__.startswith("torch.nn.modules."):  # an LSTM has a list of its weights
                    continue
                names = [n for n in before.changed(part, True) if not _harmless(part, n)]
                names = [name for name in names if _is_counted(vars(part).get(name))]
                if read := [name for name in names if (id(part), name) in self.first_read]:
                    raise CannotTrace(
                        f"{type(self.model).__name__}.forward reads {inner}.{read[0]}, which {inner} changes when it "
                        "runs, and a recording would keep its value: return it from the forward of that module",
                        definite=True,
                    )
                self.result.counts.setdefault(path, []).extend(f"{inner}.{name}" for name in names)
        for path in sorted(self.result.entered):
            module = self.modules[path]
            changed = [n for n in before.changed(module, _is_library(module)) if n != "_buffers"]
            changed = [name for name in changed if not _harmless(module, name)]
            prefix = f"{path}." if path else ""
            names = [n for n, t in module._buffers.items() if t is not None and self.names.get(id(t)) != prefix + n]
            for name in changed:
                set_alone = (id(module), name) in self.written and (id(module), name) not in self.first_read
                (self.result.lost if set_alone else names).append(prefix + name if set_alone else name)
            if not names:
                continue
            text = (
                f"{f'{path} ({type(module).__name__})' if path else type(module).__name__} sets "
                f"{', '.join(dict.fromkeys(names))} while it runs, and its forward is recorded because cuts lie "
                "inside: it would be lost. Set it in a module without cuts of its own, or, if it is a buffer, change "
                "it in place"
            )
            error = CannotTrace(text, definite=True)
            raise KeepWhole(path, error) if path else error

    def _check_questions(self) -> None:
        """Answers are found before the micro-batches run: they must not depend on state that a forward changes."""
        steps = self.result.steps
        changed = {name: step.where for step in steps for name in step.changed_names}
        for step in needed_for(steps):
            for ref in step.refs():
                if isinstance(ref, Attribute) and ref.name in changed:
                    raise CannotTrace(
                        f"{step.where}: the path of the forward depends on {ref.name}, which it changes "
                        f"({changed[ref.name]}): do both in a module without cuts of its own",
                        definite=True,
                    )


def _plain_slice(item: Any) -> Any:
    """A slice with numbers in place of values: questions, whose answers they are."""
    if type(item) is not slice:
        return item
    return slice(*(index(part) if type(part) is Value else part for part in (item.start, item.stop, item.step)))


def _renormalised(module: nn.Module) -> list[str]:
    """The weights of embeddings that a forward scales in place to ``max_norm``: fake tensors do not show it."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    parts = [(path, part) for path, part in module.named_modules() if isinstance(part, kinds)]
    return [f"{path}.weight".lstrip(".") for path, part in parts if part.max_norm is not None]


def _is_counted(value: Any) -> bool:
    """Whether a changed attribute may be state, such as a counter or a list, and is no cached tensor."""
    return isinstance(value, (int, float)) or contents(value) is not None


def _harmless(module: nn.Module, name: str) -> bool:
    """Whether a changed attribute is a flag that a library sets once, or the hooks that it installs."""
    flag = type(vars(module).get(name)) is bool and _is_library(module)
    return name.endswith("_hooks") or name.startswith("_forward_hooks") or flag


def _is_library(module: nn.Module) -> bool:
    code = getattr(forward_function(module), "__code__", None)
    return code is None or not is_users_code(code.co_filename)


def can_enter(module: nn.Module) -> bool:
    """Whether the forward of a module may be recorded: torch's own layers stay whole, its containers need not."""
    own = type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
    if own and next(module.children(), None) is None:
        return False
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        return False
    return not isinstance(module, (torch.jit.ScriptModule, Lazy))


def user_hooks(module: nn.Module, before: Collection[int] | None = None, model: nn.Module | None = None) -> bool:
    """Whether calling a module runs hooks that are not part of the model's own forward."""
    forward = [
        hook
        for hook in module._forward_hooks.values()
        if (before is None or id(hook) in before) and not _belongs_to_library(hook, model or module)
    ]
    return bool(forward or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def hooked_module(path: str, module: nn.Module) -> PlanError:
    name = f"{path} ({type(module).__name__})" if path else type(module).__name__
    name += ", like all modules," if has_global_module_hooks() else ""
    return PlanError(
        f"{name} has hooks, and no stage runs the whole of it because cuts lie inside: register the hooks on modules "
        "that are not cut"
    )


def _belongs_to_library(hook: Any, model: nn.Module) -> bool:
    """Whether the installed library of the model has registered a hook: it is a part of the forward."""
    code = getattr(hook, "__code__", None)
    package = type(model).__module__.partition(".")[0]
    return (
        code is not None
        and f"site-packages/{package}/" in code.co_filename.replace("\\", "/")
        and (getattr(hook, "__module__", None) or "").partition(".")[0] == package
    )


_original_call: Any = nn.Module.__call__


@contextmanager
def _patched(recorder: Recorder) -> Iterator[None]:
    """Let calls of modules and of autograd functions in this thread go to the recorder."""
    function: Any = torch.autograd.Function
    thread, apply, bound = threading.get_ident(), function.__dict__["apply"], function.apply.__func__

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            original = lazy_call if isinstance(module, Lazy) else _original_call
            return original(module, *args, **kwargs)
        return recorder.call_module(module, args, kwargs)

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or recorder.busy:
            return bound(cls, *args, **kwargs)
        if cls is CheckpointFunction:  # (function, preserve_rng_state, *arguments)
            with recorder.checkpointing(reentrant=True):
                return args[0](*args[2:])
        with DisableTorchFunction():
            return recorder.function(MethodType(bound, cls), args, kwargs)

    def get_attribute(module: nn.Module, name: str) -> Any:
        if threading.get_ident() == thread and not recorder.busy:
            recorder.attribute_read(module, name)
        return object.__getattribute__(module, name)

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if threading.get_ident() == thread and not recorder.busy:
            recorder.attribute_set(module, name, value)
        original_set(module, name, value)

    def get_variable(environment: Any, name: Any) -> Any:
        if threading.get_ident() == thread and not recorder.busy and environment is os.environ and type(name) is str:
            recorder.read.add(*environment_variable(name))
        return original_get(environment, name)

    def get_variables(environment: Any) -> Any:
        if threading.get_ident() == thread and not recorder.busy and environment is os.environ:
            recorder.read.add(*whole_environment())
        return original_iter(environment)

    def refuse_hooks(hooks: Any) -> None:
        if threading.get_ident() == thread and not recorder.busy:
            text = "hooks of saved tensors are not recorded: use them in a module without cuts of its own"
            raise recorder._refuse(CannotTrace(f"{user_line()}: {text}", definite=True))
        enter_hooks(hooks)

    environment: Any = type(os.environ)
    original_get, original_iter = environment.__getitem__, environment.__iter__
    saved_hooks: Any = torch.autograd.graph.saved_tensors_hooks
    enter_hooks = saved_hooks.__enter__
    original_set: Any = nn.Module.__setattr__
    lazy_call: Any = Lazy.__call__
    set_state = torch.random.set_rng_state

    def refuse_state(state: Tensor) -> None:
        if threading.get_ident() == thread and not recorder.busy:
            raise CannotTrace(f"{user_line()}: the forward sets the state of the random generator", definite=True)
        set_state(state)

    torch.random.set_rng_state = torch.set_rng_state = refuse_state  # type: ignore[assignment]
    nn.Module.__call__ = Lazy.__call__ = call  # type: ignore[method-assign,assignment]
    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
    saved_hooks.__enter__ = refuse_hooks
    nn.Module.__getattribute__ = get_attribute  # type: ignore[method-assign,assignment]
    function.apply = classmethod(applied)
    environment.__getitem__, environment.__iter__ = get_variable, get_variables
    validates = Distribution._validate_args
    try:
        Distribution.set_default_validate_args(False)  # it looks at the data, and has no other effect
        with (
            torch.compiler.set_stance("force_eager"),
            unlogged_fake_tensor_errors(),
            unchecked_data(),
            replaced_checkpoint(lambda: recorder.checkpointing(reentrant=False)),
        ):
            yield
    finally:
        del nn.Module.__getattribute__
        saved_hooks.__enter__ = enter_hooks
        nn.Module.__setattr__ = original_set  # type: ignore[method-assign]
        Distribution.set_default_validate_args(validates)
        nn.Module.__call__, Lazy.__call__ = _original_call, lazy_call  # type: ignore[method-assign]
        torch.random.set_rng_state = torch.set_rng_state = set_state
        function.apply = apply
        environment.__getitem__, environment.__iter__ = original_get, original_iter
