import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Norms sum their weights' gradients by thread: equal bits over processes need the same number of threads in each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PLUMB_BUILD_DIR", os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "build")))
sys.path.insert(0, os.path.dirname(__file__))
_TOOLS = os.path.join(os.path.dirname(__file__), "..", "..", "tools")
sys.path[1:1] = [_TOOLS, os.path.join(_TOOLS, "published_pipelining")]  # the latter has torch_names

import device  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

device.use()


def pytest_collection_modifyitems(items):
    for item in items:
        if why := device.left_out(item.name):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(autouse=True)
def same_number_of_threads():
    """The tests that come later in this process compare bits with other processes'."""
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before, f"torch had {before} threads and has {after} now"
