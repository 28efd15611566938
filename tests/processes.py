"""What the tests share that start a script as a person does: in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STRICT = ["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"]
for _module in ("_fontconfig_pattern", "_mathtext"):  # Matplotlib 3.10.0 uses names that pyparsing renamed
    STRICT += ["-W", f"ignore::DeprecationWarning:matplotlib.{_module}"]
ENCODING = ["-X", "warn_default_encoding"]  # warns where a file is opened without saying its encoding
WARNING = re.compile(r"^(.+?):\d+: \w*Warning: ", re.M)  # as Python prints it: FILE:LINE: CATEGORY: text


def run_python(*arguments, folder: Path, timeout: float = 120, **variables) -> subprocess.CompletedProcess:
    """Run python with these arguments in `folder`, without a display -> the finished process."""
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND", "PYTHONPATH")}
    environment |= {"OMP_NUM_THREADS": "1"} | variables  # small tensors, and no two threads that wait
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
    )


def own_warnings(stderr: str, root: Path = ROOT) -> list[str]:
    """The files of this project that warned. A library's warnings are its own, wherever it is installed.

    Ours are the scripts at the top and what lies in a folder with Python files right in it: an environment
    inside the checkout, such as .venv, has none there.
    """
    ours = {path.name for path in root.glob("*.py")} | {path.parent.name for path in root.glob("*/*.py")}
    found = []
    for name in WARNING.findall(stderr):
        path = root / name
        if path.is_relative_to(root) and path.relative_to(root).parts[0] in ours:
            found.append(name)
    return found
