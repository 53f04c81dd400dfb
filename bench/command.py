"""`weft bench`, in the repository also `python -m bench`: the commands."""

from __future__ import annotations

import click

from weft.cli.later import Later

__all__ = ["bench"]


class _Bench(click.Group):
    """A group whose command, where none is named, is `calls`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["calls", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Bench, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure what weft costs on this machine.

    Without a command: calls.
    """


bench.add_command(Later("attention", "bench.attention",
                        "Bytes, memory and time of attention over a sharded sequence."))
bench.add_command(Later("calls", "bench.side_by_side", "The cost of a call.", ("rich",)))
bench.add_command(Later("dry", "bench.dry",
                        "Seconds of steps beside those that a dry run estimates."))
bench.add_command(Later("field", "bench.field",
                        "Bytes, memory and time of sharded fields."))
bench.add_command(Later("links", "bench.links",
                        "Latency and bandwidth of each mesh axis, for the planner."))
bench.add_command(Later("redistribute", "bench.redistribute",
                        "Bytes and time of redistribution, beside torch's."))
bench.add_command(Later("reshard", "bench.reshard",
                        "Time, memory and bytes of the plan of a large state."))
bench.add_command(Later("train", "bench.train",
                        "Bytes, memory and time of training, beside DDP, FSDP2 and DTensor."))
