"""`python -m clairai.cli` runs the command line program."""

from clairai.cli import main

main()
