"""The class of the errors that operators of ``torch.ops.plumb`` raise in Python."""

import torch

import plumb

# torch makes an error of an operator its own from 2.15 on.
OPERATOR_ERROR = plumb.Error if torch.__version__ < (2, 15) else RuntimeError
