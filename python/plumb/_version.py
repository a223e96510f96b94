"""plumb's version. Refuses a torch that plumb's library was not built with, before the library is loaded and fails."""

import os

import torch

from ._torch_check import built, refusal

if _text := refusal(torch.__version__, os.path.dirname(torch.__file__)):
    raise ImportError(_text)
__version__: str = built()["VERSION"]
