"""Lets torch's operators on functions run under the dispatch key by which plumb watches a stage's forward.

torch dispatches ``torch.cond``, ``flex_attention`` or the checkpoint in a compiled module in Python, which asks no kernel of
C++: each such operator lists the keys that it passes over. If test_a_stage_runs_torchs_operators_on_functions fails, torch
changed, look here: it has renamed these lists.
"""

import torch

from . import _C

_key = torch._C._parse_dispatch_key(_C.recompute_key)
torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_key)  # which operators to come read
for _operator in torch._ops._higher_order_ops.values():
    _operator.fallthrough(_key)
