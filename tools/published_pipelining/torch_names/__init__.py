"""Private names of ``torch.distributed.pipelining`` that only torch's own tests use, made from plumb.

A module here stands for torch's module of the same name, or adds its names to plumb's module of that name.
"""
