"""What the README of the kernels shows is what comes out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from deepinfra.models.cache import kernel_cache_dir

README = Path(__file__).parents[2] / "kernels" / "README.md"
FOLDER = 'Path("~/.cache/deepinfra/kernels").expanduser()'


def test_the_example_of_the_readme_prints_what_it_says() -> None:
    ((program, printed),) = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert FOLDER in program
    here = program.replace(FOLDER, f"Path({str(kernel_cache_dir())!r})")
    done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, check=True)
    assert done.stdout == printed


def test_kernels_load_no_torch() -> None:
    program = "import sys, deepinfra_kernels.decoder, deepinfra_kernels.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
