"""The sweep behind the demo's learning rates: runs build/bin/plumb_demo --only for each rate and prints the losses.

    python examples/learning_rates.py [--runs fp32 plain scaled] [--rates 0.001 0.003 ...] [--steps 300] [--tau 0.01]
"""

import argparse
import json
import subprocess
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "build" / "bin" / "plumb_demo"
RATES = {
    "fp32": [0.003, 0.005, 0.01, 0.02],
    "plain": [0.001, 0.003, 0.01, 0.03],
    "scaled": [0.025, 0.05, 0.07, 0.1, 0.2],
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--runs", nargs="+", choices=list(RATES), default=list(RATES))
parser.add_argument("--rates", nargs="+", type=float, help="instead of each run's own list")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--tau", type=float, nargs="+", default=[0.01], help="tau of attention, for the unit-scaled run")
parser.add_argument("--text", help="file or folder; default: Python's standard library")
args = parser.parse_args()

for run in args.runs:
    results = []
    for rate in args.rates or RATES[run]:
        for tau in args.tau if run == "scaled" else [None]:
            command = [str(DEMO), "--only", run, "--lr", str(rate), "--steps", str(args.steps)]
            command += ["--tau-attention", str(tau)] if tau is not None else []
            command += ["--text", args.text] if args.text else []
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            result = json.loads(out.strip().splitlines()[-1])
            results.append((result["tail"], rate, tau))
            print(f"{run:7} lr {rate:<7g}" + (f" tau {tau:<5g}" if tau is not None else "") + f" loss {result['tail']:.3f}", flush=True)
    best = min(results)
    print(f"{run:7} best: lr {best[1]:g}" + (f", tau {best[2]:g}" if best[2] is not None else "") + f", loss {best[0]:.3f}\n")
