"""The files of a checkpoint: tensors in the format of ``torch.distributed.checkpoint``, other values as JSON.

    run/step-00000100/
      penstock.json      the manifest, written last and replaced atomically: a folder without it is no checkpoint
      data-3f2a91c0/     tensors, one file per rank; the manifest has their sizes and checksums
        __0_0.distcp  __1_0.distcp  .metadata

A checkpoint cannot run code when it is loaded. Tensors are read with ``weights_only=True``. Torch's ``.metadata``, a
pickle, is for other tools and is not read here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import uuid
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock._torch import stored_chunk
from penstock.errors import CheckpointError, PenstockError, PlanError, text_of
from penstock.json_schema import Maybe, check_schema, parse_json

MANIFEST = "penstock.json"
FORMAT = "penstock checkpoint 1"
_BLOCK = 1 << 24  # bytes

# ── Python values as JSON ────────────────────────────────────────────────────────────────────────────────────────────


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON data. Its tensors are added to ``tensors`` under names that begin with ``name``."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, Tensor):
        return {"tensor": _add_tensor(value.detach(), name, tensors)}
    if kind in (list, tuple, set, deque):
        items = [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if kind is list else {kind.__name__: items}
    if isinstance(value, Mapping):
        pairs = [[encode(key, name, tensors), encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]
        return {"counter" if kind is Counter else "dict": pairs}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in (torch.dtype, torch.device):
        return {kind.__name__: str(value).removeprefix("torch.")}
    if hasattr(value, "__array__"):  # NumPy
        with suppress(TypeError):  # torch has no strings
            array = torch.as_tensor(value)
            return {"array": _add_tensor(array, name, tensors)} if array.dim() else array.item()
    raise CheckpointError(
        f"{name} is a {kind.__name__}: a checkpoint holds numbers, strings, tensors, and lists, tuples and dicts of "
        "them"
    )


def _add_tensor(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def decode(data: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The inverse of ``encode``; ``tensor(name)`` returns the tensors."""
    if isinstance(data, list):
        return [decode(item, tensor) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise CheckpointError("the manifest has an entry that is not an encoded value")
    ((kind, inner),) = data.items()
    try:
        return _decode(kind, inner, tensor)
    except (TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the manifest has a malformed value of the kind {kind!r}: {error}") from error


def _decode(kind: str, inner: Any, tensor: Callable[[str], Tensor]) -> Any:
    if kind in ("dict", "counter"):
        pairs = [(decode(key, tensor), decode(item, tensor)) for key, item in inner]
        return Counter(dict(pairs)) if kind == "counter" else dict(pairs)
    sequences: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "deque": deque}
    if kind in sequences:
        return sequences[kind](decode(item, tensor) for item in inner)
    if kind == "tensor":
        return tensor(inner)
    if kind == "array":
        return tensor(inner).numpy()
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "device":
        return torch.device(inner)
    if kind == "dtype" and isinstance(getattr(torch, inner, None), torch.dtype):
        return getattr(torch, inner)
    raise CheckpointError(f"the manifest has a value of the unknown kind {kind!r}")


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _torch_errors(problem: str) -> Iterator[None]:
    """Raise the first rank's error as ``CheckpointError``, and suppress torch's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:  # a BaseException
            rank, (cause, _) = min(error.failures.items())
            first = str(cause).strip().partition("\n")[0]
            raise CheckpointError(f"{problem}: on rank {rank}, {type(cause).__name__}: {first}") from cause


class _Writer(FileSystemWriter):
    """Keeps the metadata that the coordinator has collected."""

    metadata: Metadata | None = None

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        # torch 2.10 puts the places of the chunks into a copy.
        places = {result.index: result.storage_data for row in results for result in row}
        self.metadata = dataclasses.replace(metadata, storage_data=places)


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks of ``group``, in order; without a group, only ``value``."""
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def attempt(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The value of ``make()``, or the exception that it raised."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def gather_results(result: tuple[Any, Exception | None], problem: str, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks. An error of one rank is raised on all of them, so that none waits for another."""
    value, own = result
    rows = gather((value, None if own is None else f"{type(own).__name__}: {text_of(own)}"), group)
    if isinstance(own, PenstockError):
        raise own
    for rank, (_, text) in enumerate(rows):
        if text is not None:
            raise CheckpointError(f"{problem}: on rank {rank}, {text}") from own
    return [value for value, _ in rows]


def write_checkpoint(
    path: Path, tensors: dict[str, Tensor], content: Mapping[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Write the tensors of all ranks of ``group`` and the first rank's ``content``. All ranks call it.

    A tensor that several ranks have under one name is written by one of them. The new manifest replaces an old one
    atomically, and the old files are deleted afterwards: at any time there is one complete checkpoint.
    """
    rank, problem = 0 if group is None else dist.get_rank(group), f"the checkpoint {path} cannot be written"
    data: str = gather(f"data-{uuid.uuid4().hex[:8]}", group)[0]
    folder = path / data
    writer, planner = _Writer(folder), DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _torch_errors(problem):
        save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    own = attempt(lambda: {f.name: [f.stat().st_size, checksum(f)] for f in folder.glob(f"__{rank}_*")})
    files = {name: entry for part in gather_results(own, problem, group) for name, entry in part.items()}

    def finish() -> None:
        if rank == 0:
            assert writer.metadata is not None
            described = {"format": FORMAT, "data": data, "files": files, "tensors": _describe(writer.metadata)}
            _replace(path, data, json.dumps({**described, **content}, separators=(",", ":")))

    gather_results(attempt(finish), problem, group)  # every rank waits for the manifest


def _describe(metadata: Metadata) -> dict[str, Any]:
    """By tensor: dtype, shape, and for each chunk its offsets, its sizes, its file, and its position there."""
    found: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        chunks = []
        for chunk in entry.chunks:
            at = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            chunks.append([[*chunk.offsets], [*chunk.sizes], at.relative_path, at.offset, at.length])
        found[name] = [str(entry.properties.dtype).removeprefix("torch."), [*entry.size], chunks]
    return found


def _replace(path: Path, data: str, manifest: str) -> None:
    """Write ``manifest``, whose files are in ``data``, to ``path``, and delete the files of the previous one."""
    _sync(path / data)
    temporary = path / f"{MANIFEST}.{data}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path / MANIFEST)
    _sync(path)
    _sync(path.parent)
    for old in path.iterdir():
        if old.name.startswith(("data-", f"{MANIFEST}.")) and old.name != data:
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def _sync(folder: Path) -> None:
    """Write the directory entries of a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(file: Path) -> str:
    value = 0
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, validated."""
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    try:
        manifest: dict[str, Any] = parse_json(text, f"{path / MANIFEST} cannot be read")
        check_schema(manifest, {"format": str}, f"{path / MANIFEST} is damaged: it")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path / MANIFEST} is not the manifest of a {FORMAT!r}")
        check_schema(manifest, _SCHEMA, f"{path / MANIFEST} is damaged: it")
    except PlanError as error:
        raise CheckpointError(str(error)) from error
    outside = [name for name in (manifest["data"], *manifest["files"]) if name in ("", "..") or Path(name).name != name]
    for name, (dtype, shape, chunks) in manifest["tensors"].items():
        known = isinstance(getattr(torch, dtype, None), torch.dtype)
        sizes = all(len(shape) == len(chunk[0]) == len(chunk[1]) for chunk in chunks)
        outside += [] if known and sizes and all(chunk[2] in manifest["files"] for chunk in chunks) else [name]
    if outside:
        raise CheckpointError(f"{path / MANIFEST} is damaged: its entry for {outside[0]!r} is malformed")
    return manifest


def check_files(path: Path, manifest: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise an error if one of the files is missing or damaged."""
    for name in names:
        file, (size, digest) = path / manifest["data"] / name, manifest["files"][name]
        if not file.is_file():
            raise CheckpointError(f"the checkpoint {path} is incomplete: {file.name} is missing")
        found = file.stat().st_size
        if found != size:
            raise CheckpointError(f"the checkpoint {path} is damaged: {name} has {found} bytes, not {size}")
        if checksum(file) != digest:
            raise CheckpointError(f"the checkpoint {path} is damaged: the checksum of {name} differs")


_SCHEMA: dict[str, Any] = {
    "data": str,
    "files": {str: (int, str)},  # size and checksum
    "tensors": {str: (str, [int], [([int], [int], str, int, int)])},  # see ``_describe``
    "step": Maybe(int),
    "steps": int,
    "random": [object],
    "values": {str: object},
    "objects": {str: object},
    "optimizer": Maybe({"class": str, "groups": [(object, [str])], "states": {str: object}}),
}


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def read_tensors(path: Path, manifest: Mapping[str, Any], targets: dict[str, Tensor]) -> None:
    """Read the tensors, or this process's shards of DTensors, from a checkpoint, after a check of its files."""
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for name in targets:
        dtype, shape, chunks = manifest["tensors"][name]
        properties = TensorProperties(dtype=getattr(torch, dtype))
        stored = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in chunks]
        described[name] = TensorStorageMetadata(properties, torch.Size(shape), stored)
        for offsets, _, file, offset, length in chunks:
            places[MetadataIndex(name, offsets)] = stored_chunk(file, offset, length)
    check_files(path, manifest, sorted({chunk[2] for name in targets for chunk in manifest["tensors"][name][2]}))
    reader = _Reader(path / manifest["data"], Metadata(described, storage_data=places))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if targets:
        with _torch_errors(f"the checkpoint {path} cannot be read"):
            load(targets, storage_reader=reader, planner=planner, no_dist=True)
