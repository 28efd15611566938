"""Settings for the whole test run."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors here are small: one thread is quicker than two that wait for each other."""
    torch.set_num_threads(1)
