"""A child that runs the toy executor, with faults: `toy_child.py OPTIONS_JSON FD`."""

from __future__ import annotations

import json
import os
import sys
import time

from deepinfra.core.model import Computing, ExecutorIdentity
from deepinfra.core.step import StepPlan
from deepinfra.errors import ExecutorLost, UnsupportedModelError
from deepinfra.executors.process import serve_child
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.executor import StepHandle


class FaultyToy(ToyExecutor):
    """`fault` happens when step number `at` is submitted; `start` when it is entered."""

    def __init__(self, fault: str, at: int, **options: int) -> None:
        super().__init__(**options)
        self.fault, self.at = fault, at

    @property
    def identity(self) -> ExecutorIdentity:
        numerics = "ordinary slow" if self.fault == "falls-back" else super().identity.numerics
        return super().identity._replace(numerics=numerics)

    @property
    def computing(self) -> Computing:
        return super().computing._replace(path="child")

    def use_staging(self, buffer: memoryview) -> None:
        if self.fault == "refuse":
            raise UnsupportedModelError("rope_scaling", "wild")
        if self.fault == "crash-at-start":
            raise RuntimeError("a bug")
        if self.fault == "slow-start":
            time.sleep(60)
        super().use_staging(buffer)

    def submit(self, plan: StepPlan) -> StepHandle:
        if plan.step == self.at:
            match self.fault:
                case "exit":
                    os._exit(7)
                case "hang":
                    time.sleep(60)
                case "slow":
                    time.sleep(0.3)
                case "garbage":
                    os.write(int(sys.argv[2]), b"\x03\x00\x00\x00\xc1\xc1\xc1" * 3)
                case "long":
                    os.write(int(sys.argv[2]), b"\xff\xff\xff\xff")
                case "unasked":
                    os.write(int(sys.argv[2]), b"\x03\x00\x00\x00\x92\x12\xcd")
                case "lost":
                    return _Lost()
        return super().submit(plan)


class _Lost(StepHandle):
    async def result(self) -> None:  # type: ignore[override]
        raise ExecutorLost("the device fell off the bus")


def main() -> None:
    options = json.loads(sys.argv[1])
    fault, at = options.pop("fault", ""), options.pop("at", 0)
    print("what a library prints does not reach standard output")
    serve_child(FaultyToy(fault, at, **options), int(sys.argv[2]))


if __name__ == "__main__":
    main()
