"""Settings for the whole test run."""

import signal

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors here are small: one thread is quicker than two that wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_works():
    """A job in the background is started with Ctrl-C ignored, and so are its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
