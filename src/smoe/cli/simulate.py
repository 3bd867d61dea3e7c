"""`smoe simulate`: simulates the measurements of a paper with the paper's own settings; needs the repository
(`bench/papers`)."""

from __future__ import annotations

from typing import Annotated

import typer

from smoe.cli.options import Debug, Json

EPILOG = """Examples:

smoe simulate --paper duoserve

smoe simulate --paper od-moe

smoe simulate --paper hobbit --json

Nothing is measured here: routing is synthetic, devices are profiles.
The command needs the source repository, not only the installed package.
"""


def command(
    paper: Annotated[str, typer.Option(help="The paper to simulate: smoe, hobbit, duoserve or od-moe.")],
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Simulate every setting again, even if its result is stored.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Simulate a paper's measurements on the devices that it names, and compare the results with its claims.

    The engine's own plans run on a virtual clock. A claim is a gain: how many times faster one system is than another.
    It holds if the smallest gain of the simulation is above 1 and at least nine tenths of the paper's smallest. It
    holds in part if only the largest simulated gain is that large. It holds by less if no simulated gain is that large,
    but all are above 1. od-moe also claims figures: such a claim holds if the simulated figure is within its tolerance.

    Every finished setting is stored in the user's cache folder: an interrupted command continues there, and a setting
    that this version of smoe has simulated is not simulated again.
    """
    from smoe.cli.checkout import from_checkout

    from_checkout("papers.command", "smoe simulate").simulate(paper, is_fresh=fresh, as_json=json)
