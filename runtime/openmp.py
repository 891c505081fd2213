"""How long idle OpenMP threads spin: briefly, since other programs may need the core.

A parallel loop ends with a barrier at which threads spin until the last one arrives. If another
program holds one of the cores, that last one is not running, and with the default the others keep
a core busy for milliseconds at each of thousands of barriers a step. A step then took 3 to 30 times
as long. With a short spin it takes twice as long next to one busy program.
"""

import os

SPINNING = {
    "GOMP_SPINCOUNT": "1000",  # GNU's, in torch's wheels for Linux: rounds; its default is 300,000
    "KMP_BLOCKTIME": "1",  # LLVM's and Intel's, on macOS and Windows: ms; its default is 200
}


def spin_briefly() -> None:
    """Set the variables that the user has not set. Call it before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:  # else the user has chosen for any OpenMP
        for name, value in SPINNING.items():
            os.environ.setdefault(name, value)


def spinning() -> str:
    """The variables as they are in this process, for the log."""
    names = ("OMP_WAIT_POLICY", *SPINNING)
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
