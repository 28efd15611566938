"""Settings for the whole test run."""

import os
import signal

import pytest
import torch
from browser import CHROMIUM, Browser
from torch.overrides import TorchFunctionMode

FACTORIES = {
    getattr(torch, name) for name in "arange as_tensor empty eye full ones rand randn tensor zeros".split()
}


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors here are small: one thread is quicker than two that wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_works():
    """A job in the background is started with Ctrl-C ignored, and so are its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def process_as_before():
    """run_script sets up its process: here, that of all tests."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    precision = torch.get_float32_matmul_precision()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_float32_matmul_precision(precision)


class EveryDeviceGiven(TorchFunctionMode):
    """Within: a tensor made without saying where is an error. On a GPU it would lie on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in FACTORIES:
            assert (kwargs or {}).get("device") is not None, f"torch.{func.__name__} without a device"
        return func(*args, **kwargs or {})


@pytest.fixture
def every_device_given():
    with pytest.raises(AssertionError, match="torch.zeros without a device"), EveryDeviceGiven():
        torch.zeros(1)
    return EveryDeviceGiven


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium. Where there is none, the test is skipped, or fails if REQUIRE_BROWSER is set."""
    if CHROMIUM is None:
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail("there is no Chromium, and REQUIRE_BROWSER is set")
        pytest.skip("needs Chromium: apt-get install chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
