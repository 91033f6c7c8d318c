"""`deepinfra simulate`: what a configuration would do, in virtual time and without a model."""

from __future__ import annotations

import typer

from deepinfra.cli.simulate import plan, run

__all__ = ("simulate",)

simulate = typer.Typer(
    no_args_is_help=True,
    help="Try schedulers, stores and numbers of replicas on recorded or made-up requests, in virtual time.",
)

simulate.command("run")(run.run)
simulate.command("plan")(plan.plan)
