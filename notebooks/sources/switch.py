# %%
IMPL = "reference"  # or "student"

import os, sys
from pathlib import Path
places = (Path.cwd(), *Path.cwd().parents, *Path.cwd().glob("*/"))  # the last: in Colab the kit lies beside the notebook
ROOT = next((p for p in places if (p / "assignment.toml").exists()), None)
if ROOT is None:
    raise SystemExit(f"expected the kit in {Path.cwd()} or above, found none: clone it there, or unzip the archive there")
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))

import matplotlib.pyplot as plt
from lab.harness.runner import Executor, ProbeFailed, Runner
runner = Runner(Executor(ROOT / IMPL))
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe-Ito

def ask(probe, *args, **options):
    """The probe's value, or one clear line and None where the exercise is not written yet."""
    try:
        return runner.run(probe, *args, **options)
    except ProbeFailed as error:
        print(error.text)
