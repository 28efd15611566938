"""Several processes train one model: what they tell each other. torchrun starts and numbers them.

Every process (rank) has its own copy of the model and, in each step, its own batch; gradients are averaged
over all, so that the copies stay the same. With one process every function here does nothing, and so
`translation.train` is one script for both. Source: Li et al. 2020 (PyTorch Distributed).
"""

import contextlib
import datetime
import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from toolbox.device import choose_device


def rank() -> int:
    """This process's number: 0 writes the files and prints."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def started() -> int:
    """How many processes torchrun started; 1 without it. Known before they know each other.

    Single variables left over from something else, such as RANK, are no torchrun.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1


def own_device(name: str) -> torch.device:
    """--device -> the device of this process: under torchrun one of its machine's GPUs, no other process's.

    ValueError as in `choose_device`, and where this process has no GPU of its own.
    """
    if started() == 1 or name == "cpu" or not torch.cuda.is_available():
        return choose_device(name)
    local = int(os.environ["LOCAL_RANK"])
    here = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # processes on this machine
    if here > torch.cuda.device_count():  # then none of them may go on to wait for the others
        raise ValueError(
            f"torchrun --nproc-per-node: every process needs a GPU, and this machine has "
            f"{torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local)  # first: what `choose_device` tries, it tries on the current GPU
    choose_device("cuda")  # "auto" too: one process alone must not go to the CPU
    return torch.device("cuda", local)


class OneOfMany(ValueError):
    """What ends one of several processes: the loss of another one, or something of its own."""


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Within: the processes that torchrun started can talk to each other. Waits for all of them first.

    OneOfMany where they no longer can.
    """
    if started() == 1:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    # Rank 0 validates and translates alone while the others wait: longer than the usual limit of minutes.
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=2))
    try:
        yield
    except RuntimeError as error:  # also what a backend raises when another process no longer answers
        text = " ".join(str(error).split())
        raise OneOfMany(f"torchrun: process {rank()} had to end ({text[:200]})") from None
    finally:
        dist.destroy_process_group()


def parallel(model: torch.nn.Module) -> torch.nn.Module:
    """What to call in training so that `backward` averages gradients; it has the weights of `model`."""
    if world_size() == 1:
        return model
    gpu = next(model.parameters()).device
    # The only buffers are position tables, the same everywhere. PyTorch 2.13 gave the option another name.
    names = inspect.signature(DistributedDataParallel).parameters
    quiet = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return DistributedDataParallel(
        model, device_ids=[gpu.index] if gpu.type == "cuda" else None, **{quiet: False}
    )


def summed(values: Tensor) -> Tensor:
    """The sum of all processes' tensors, in every process."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def any_of(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    return bool(summed(torch.tensor(int(flag))))


def from_first(value: Any) -> Any:
    """Rank 0's value, any that pickles, in every process; the others wait for it."""
    if world_size() > 1:
        box = [value]
        dist.broadcast_object_list(box)
        value = box[0]
    return value


def from_all(value: Any) -> list:
    """All processes' values, ordered by rank, in every process."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
