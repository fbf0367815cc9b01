"""The command line program `clairai`: one module for each group of commands.

Runs in: the user's terminal. The commands import the rest of clairai only when they run.
"""

from clairai.cli.commands import main as main
