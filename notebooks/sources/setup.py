# %%
# Set-up: run this cell as it is. On Colab the notebook is alone, so the cell must fetch the kit before it can import it:
# there, put the address of your copy between the quotes. Nothing is installed.
ADDRESS = ""
import glob, os, sys
if ADDRESS and not os.path.exists("kit"):
    os.system(f"git clone --quiet --depth 1 {ADDRESS} kit")
kits = [os.path.abspath(folder) for folder in (".", "..", *glob.glob("*/")) if os.path.exists(f"{folder}/assignment.toml")]
if not kits:
    raise SystemExit(f"no kit in {os.getcwd()}: set ADDRESS above, or unzip the archive here; then run this cell again")
sys.path.insert(0, kits[0])
from notebooks.setup import *
