"""`accelerate launch` as an entry of `ranks`: the same command, in a process that has imported torch already."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.commands.launch import launch_command, launch_command_parser


def main(arguments: Sequence[str]) -> int:
    """Launches; an error ends in accelerate's own report."""
    launch_command(launch_command_parser().parse_args(arguments))
    return 0
