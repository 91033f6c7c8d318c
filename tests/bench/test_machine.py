from __future__ import annotations

import os
import subprocess
import sys
import time

from deepinfra.bench.machine import NOISY_CORES, CpuWatch

BURN = "import time\nwhile time.process_time() < 0.4: pass"


def test_work_of_this_process_and_of_its_children_is_its_own() -> None:
    watch, began = CpuWatch(), time.monotonic()
    until = time.process_time() + 0.4
    while time.process_time() < until:
        pass
    subprocess.run([sys.executable, "-c", BURN], check=True)
    use = watch.stop(time.monotonic() - began)
    assert use.own_cores * (time.monotonic() - began) > 0.7


def test_work_of_a_child_that_still_runs_is_its_own() -> None:
    code = f"{BURN}\nprint(flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        watch, began = CpuWatch(), time.monotonic()
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        use = watch.stop(time.monotonic() - began)
        child.stdin.write(b"\n")
    assert use.own_cores * (time.monotonic() - began) > 0.2


def test_work_of_a_stranger_is_noise() -> None:
    # Orphaned at once, so that it is nobody's child here; it says by closing the pipe that it is done.
    code = f"import os\nif os.fork() == 0:\n    os.setsid()\n    exec({BURN!r})"
    watch, began = CpuWatch(), time.monotonic()
    read, write = os.pipe()
    subprocess.run([sys.executable, "-c", code], check=True, pass_fds=[write])
    os.close(write)
    while os.read(read, 1):
        pass
    os.close(read)
    wall_s = time.monotonic() - began
    use = watch.stop(wall_s)
    assert use.others_cores * wall_s > 0.3
    assert use.noisy == (use.others_cores > NOISY_CORES)
