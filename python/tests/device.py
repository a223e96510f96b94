"""The device that tests run on: PLUMB_TEST_DEVICE in the environment, or the CPU.

"testdevice" is tests/device/test_device.cpp. Every process of a test that uses a device calls use() first.
"""

import contextlib
import os
import types

import torch

NAME = os.environ.get("PLUMB_TEST_DEVICE") or "cpu"


def _load_testdevice():
    build = os.environ.get("PLUMB_BUILD_DIR") or os.path.join(os.path.dirname(__file__), "..", "..", "build")
    torch.ops.load_library(os.path.join(build, "libplumb_test_device.so"))
    ops = torch.ops.plumb_test_device
    module = types.ModuleType("torch.testdevice")

    def index(device):
        return (torch.device(device).index or 0) if isinstance(device, (str, torch.device)) else device

    @contextlib.contextmanager
    def chosen(device):
        before = ops.get_device()
        ops.set_device(index(device))
        try:
            yield
        finally:
            ops.set_device(before)

    module.device = chosen
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = ops.get_device
    module.set_device = lambda device: ops.set_device(index(device))
    module.manual_seed_all = module.manual_seed = ops.manual_seed
    module.get_rng_state = lambda device=0: ops.get_rng_state(index(device))
    module.set_rng_state = lambda state, device=0: ops.set_rng_state(state, index(device))
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.synchronize = lambda device=None: None
    torch._register_device_module("testdevice", module)
    torch.utils.generate_methods_for_privateuse1_backend()


def use():
    """Makes the device this process's default: what torch's functions make lies on it."""
    if NAME == "cpu" or getattr(use, "done", False):
        return
    if NAME.startswith("testdevice"):
        _load_testdevice()
    torch.set_default_device(NAME)
    use.done = True
