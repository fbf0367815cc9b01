"""The `clairai` command: one module for each group of subcommands."""

from clairai.cli.commands import main as main
