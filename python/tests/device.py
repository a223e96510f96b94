"""The device that tests run on: PLUMB_TEST_DEVICE in the environment, or the CPU.

"testdevice" is tests/device/test_device.cpp. Every process of a test that uses a device calls use() first.
"""

import atexit
import contextlib
import os
import types

import torch

FOLDER = os.path.dirname(os.path.abspath(__file__))
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
    atexit.register(ops.finish_backward)


def use():
    """Makes the device this process's default: what torch's functions make lies on it."""
    if NAME == "cpu" or getattr(use, "done", False):
        return
    if NAME.startswith("testdevice"):
        _load_testdevice()
    torch.set_default_device(NAME)
    use.done = True


# Tests left out on the test device: parts of their names, by the reason.
_NOT_THERE = {
    "torch quantizes on the CPU alone": ("quantized_after_it_was_scaled",),
    "torch has no kernels of recurrent layers for it": (
        "LSTM", "GRU", "recurrent", "a_cell_in_a_loop", "packed_sequences", "LSTMCell",
    ),
    "torch's check of operators knows its own devices only": ("torch_finds_nothing_wrong", "pass_torchs_own_checks"),
    "NumPy and DLPack read the CPU's memory only": (
        "ml_dtypes", "raw_memory", "visualiser_draws", "leaves_torch_unseen",
        "refuses_values_taken_out_of_tensors_naming_operator_and_line",
    ),
    "the compiler has no code for it": (
        "torch_compile_follows", "a_compiled_layer_has_the_same_gradients", "tracking_is_a_backend",
    ),
    "a gradient inside of the forward runs in a thread of the device's, which a capture refuses": (
        "gradients_taken_inside_of_the_forward",
    ),
    "torch saves random states of its own devices only in a compiled checkpoint": ("operators_on_functions[checkpoint]",),
    "transformers asks for another package where there is a default device": ("checkpoint_of_transformers_is_folded",),
    "transformers 5 counts tokens of experts as integers off the CPU, where torch's histc knows floats only": (
        "mixtures_of_transformers",
    ),
    "torch's own group_norm refuses channels last there": ("group_norm-channels last",),
    "torch's DistributedDataParallel needs a backend of the device's": ("means_over_replicas", "lost_during_the_mean"),
    "the command knows torch's own devices": ("a_file_bears_the_mark_of_its_module",),
    "it has no kernels of sparse tensors": ("sparse_inputs_of_every_layout",),
    "stages stand on the CPU on purpose, or as they are read": (
        "stages_move_with_their_device_arguments", "stages_are_sent_to_their_ranks",
    ),
}  # fmt: skip


def left_out(test):
    """Why this test does not run on the test device, if it does not."""
    if not NAME.startswith("testdevice"):
        return None
    return next((why for why, parts in _NOT_THERE.items() if any(part in test for part in parts)), None)
