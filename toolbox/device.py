"""Where to compute, and in which precision."""

import argparse
import warnings

import torch

from toolbox.command_line import note


def add_device_option(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default=default, help="auto: cuda if there is one"
    )


def add_precision_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="auto: bf16 on a GPU that has it",
    )


def choose_device(name: str) -> torch.device:
    """--device -> torch.device. auto takes a GPU that works; where one does not, it says so.

    ValueError when cuda is asked for and there is none, or none that can be used.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no usable CUDA device; use cpu or auto")
    if trouble := cuda_trouble():
        if name == "cuda":
            raise ValueError(f"--device cuda: the GPU cannot be used ({trouble}); use cpu or auto")
        note(f"the GPU cannot be used ({trouble}): computing on the CPU")
        return torch.device("cpu")
    return torch.device("cuda")


def cuda_trouble() -> str:
    """Why a small computation fails on the GPU, in a few words; "" when it does not.

    PyTorch finds a GPU that is too old for the kernels it was built with, and fails at the first of them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # many lines about such a GPU; ours is one
            ones = torch.ones(2, 2, device="cuda")
            (ones @ ones).sum().item()
    except Exception as error:  # a missing kernel, no memory left, a driver that does not answer
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def choose_precision(name: str, device: torch.device) -> tuple[str, str]:
    """--precision -> "bf16" or "fp32", and why. auto takes bf16 where the GPU has units for it.

    ValueError when bf16 is asked for on a GPU without them. fp16 would need a gradient scaler: not offered.
    """
    has_units = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "bf16" and not has_units:
        raise ValueError("--precision bf16: this GPU has no bf16 units; use fp32 or auto")
    if name != "auto":
        return name, "as asked"
    if device.type == "cpu":
        return "fp32", "CPU"
    return ("bf16", "autocast") if has_units else ("fp32", "this GPU has no bf16 units")


def device_name(device: torch.device) -> str:
    """For logs: the GPU's name, or how many CPU threads are used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"
