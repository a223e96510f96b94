#!/usr/bin/env python3
"""The table of docs/howto/fold.md: trained unit-scaled models, folded, against the plain models with those weights.

Run it from the repository's root with the package on the path.
"""

import sys

sys.path.insert(0, "python/tests")

import torch  # noqa: E402
import transform_models as cases  # noqa: E402
from tables import table  # noqa: E402

import plumb  # noqa: E402


def row(name):
    model, args, kwargs = cases.made(name)
    scaled = cases.trained(model, args, kwargs)
    fresh = model.state_dict()
    folded = plumb.transforms.fold(scaled, *args, **kwargs)
    wrong = {k: v for k, v in scaled.state_dict().items() if k in fresh}
    scaled.eval(), model.eval()
    with torch.no_grad():
        wanted = cases.first_tensor(scaled(*args, **kwargs))
        differences = []
        for weights in (wrong, folded.state_dict()):
            model.load_state_dict(weights)
            differences.append(cases.difference(cases.first_tensor(model(*args, **kwargs)), wanted))
    divided = sum(e["kind"] == "folded" for e in plumb.report(folded)[0]["entries"])
    return [name, f"{divided} of {len(list(model.parameters()))}", f"{differences[1]:.1e}", f"{differences[0]:.2g}"]


def main():
    torch.set_num_threads(1)
    print(table(["model", "parameters and statistics divided", "difference", "without folding"], map(row, cases.FOLDED)))


if __name__ == "__main__":
    main()
