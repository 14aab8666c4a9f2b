"""What has to hold before a model is wrapped: it can be trained, and all ranks hold the same one.

What a rank can see by itself is checked before the first message, and fails on all that run the same program. What
ranks can only see together fails on every rank, with the same words.
"""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpx.arena import names_text
from ddpx.errors import Mismatch
from ddpx.group import Group

Line = tuple[str, list[int], list[int], str, bool]  # name, shape, stride, dtype, whether trained


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Names given to `_set_params_and_buffers_to_ignore_for_model`: neither shared nor reduced."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def parameters_of(module: nn.Module, ignored: frozenset[str]) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if name not in ignored}


def buffers_of(module: nn.Module, ignored: frozenset[str]) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def check_trainable(parameters: Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters to reduce; ValueError or RuntimeError when they can't be trained."""
    lazy = [name for name, param in parameters.items() if isinstance(param, nn.parameter.UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy forward "
            f"pass to correctly initialize the modules. Uninitialized: {', '.join(lazy)}."
        )
    trained = [(name, param) for name, param in parameters.items() if param.requires_grad]
    if not trained:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    wrapped = [name for name, param in parameters.items() if type(param.data).__name__ == "DTensor"]
    if wrapped:
        raise TypeError(
            f"DDPX reduces plain tensors, and {wrapped[0]} is a DTensor: use torch's fully_shard or "
            "DistributedDataParallel for models that are sharded as well."
        )
    return trained


def device_of(
    parameters: Mapping[str, nn.Parameter],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> torch.device:
    """The one device of a model; ValueError in DDP's words when there are several, or `device_ids` do not fit."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {param.device for param in parameters.values()}
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {kinds}."
        )
    if (device_ids or output_device is not None) and (kinds == {"cpu"} or len(devices) > 1):
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-"
            f"device GPU modules or CPU modules, but got device_ids {device_ids}, output_device {output_device}, and "
            f"module parameters {devices}."
        )
    if len(devices) > 1:
        raise ValueError(
            f"DDPX needs a module on one device, but its parameters are on {', '.join(sorted(map(str, devices)))}. "
            "For a model that spans devices use torch's pipelining or fully_shard."
        )
    return devices.pop()


def refuse_sync_batch_norm_on_cpu(module: nn.Module, device: torch.device) -> None:
    if device.type == "cpu" and any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")


def agree_on_model(
    group: Group, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], options: Mapping[str, Any]
) -> None:
    """Raise the same Mismatch on every rank, naming the first difference, unless model and options are the same.

    Options are compared as text.
    """
    lines = [
        (name, list(tensor.shape), list(tensor.stride()), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in [*parameters.items(), *buffers.items()]
    ]
    settings = {name: str(value) for name, value in options.items()}
    digests = group.gather("model fingerprint", hashlib.sha256(pickle.dumps((lines, settings))).hexdigest())
    if len(set(digests)) == 1:
        return
    models = group.gather("model", (lines, len(parameters), settings))
    for rank, theirs in enumerate(models):
        difference = _difference(models[0], theirs, rank)
        if difference:
            raise Mismatch(difference)


def _difference(
    reference: tuple[list[Line], int, dict[str, str]], theirs: tuple[list[Line], int, dict[str, str]], rank: int
) -> str:
    """The first difference between rank 0's model and another's, in DDP's words where it has some; "" for none."""
    (lines, count, settings), (their_lines, their_count, their_settings) = reference, theirs
    if their_count != count:
        names, their_names = {line[0] for line in lines[:count]}, {line[0] for line in their_lines[:their_count]}
        return (
            f"DDP expects same model across all ranks, but Rank {rank} has {their_count} params, while rank 0 has "
            f"inconsistent {count} params. Only one of them has {names_text(sorted(names ^ their_names))}."
        )
    for index, (line, their_line) in enumerate(zip(lines, their_lines, strict=False)):
        if line == their_line:
            continue
        if line[0] == their_line[0] and line[1:3] != their_line[1:3] and index < count:
            return (
                f"[{rank}]: params[{index}] in this process with sizes {their_line[1]} appears not to match sizes of "
                f"the same param in process 0. It is {line[0]}: rank 0 has {_text(line)}, rank {rank} has "
                f"{_text(their_line)}."
            )
        return (
            f"DDP expects same model across all ranks, but they differ first at tensor {index}: "
            f"rank 0 has {_text(line)}, rank {rank} has {_text(their_line)}."
        )
    if len(their_lines) != len(lines):
        return (
            f"DDP expects same model across all ranks, but rank {rank} has {len(their_lines) - their_count} buffers, "
            f"while rank 0 has {len(lines) - count}."
        )
    for name, value in settings.items():
        if their_settings[name] != value:
            return (
                f"every rank has to wrap its model with the same settings, but {name} is {value} on rank 0 and "
                f"{their_settings[name]} on rank {rank}."
            )
    return ""


def _text(line: Line) -> str:
    name, shape, stride, dtype, trained = line
    return f"{name} {shape} stride {stride} {dtype}{'' if trained else ' not trained'}"
